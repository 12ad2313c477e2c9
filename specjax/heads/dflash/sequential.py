"""DSpark's sequential head: a low-rank correction of each slot's logits by the token before it.

    vanilla:  U_k + W2 e_k                       e_k = W1[t_k], t_k the token before slot k's draft
    gated:    U_k + W2 (sigmoid(Wg [h_k ; e_k] + b) * e_k)
    rnn:      [f ; c ; o] = Wj [s_{k-1} ; e_k ; h_k] + b;   U_k + W2 tanh(o)
              s_k = sigmoid(f) s_{k-1} + (1 - sigmoid(f)) tanh(c), s_{-1} = 0 in each block

U_k are the backbone's logits (after a soft-cap), h_k its states after the final norm. The output
`o` of the recurrent form sees the state before its update.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.params import ParamSpec
from specjax.layers.embedding import lookup
from specjax.layers.linear import linear_f32

if TYPE_CHECKING:
    from specjax.heads.dflash.head import DFlashHead
    from specjax.heads.dflash.network import DFlashWeights

Weight = Any


@struct.dataclass
class MarkovWeights:
    """Weights of a sequential head of rank r; None stands for what its form lacks.

    Attributes:
        w1: `[V, r]` embeds the token before, a target id.
        w2: `[Vd, r]` gives the correction.
        gate: `[r, H + r]`.
        gate_bias: `[r]`.
        joint: `[3 r, 2 r + H]`.
        joint_bias: `[3 r]`.
    """

    w1: Weight
    w2: Weight
    gate: Weight = None
    gate_bias: Weight = None
    joint: Weight = None
    joint_bias: Weight = None


def markov_specs(head: DFlashHead) -> MarkovWeights | None:
    """Return the weight table, None for a head without one."""
    rank, hidden = head.config.markov_rank, head.geometry.hidden
    if not rank:
        return None

    def matrix(name: str, out: int, into: int, axes: tuple[str | None, str | None]) -> ParamSpec:
        return ParamSpec((out, into), axes, f"markov_head.{name}.weight")

    def bias(name: str, size: int) -> ParamSpec:
        return ParamSpec((size,), (None,), f"markov_head.{name}.bias", init="zeros")

    weights = MarkovWeights(
        w1=matrix("markov_w1", head.vocab, rank, ("vocab", None)),
        w2=matrix("markov_w2", head.draft_vocab, rank, ("vocab", None)),
    )
    form = head.config.markov_head
    if form == "gated":
        return dataclasses.replace(
            weights,
            gate=matrix("gate_proj", rank, hidden + rank, (None, None)),
            gate_bias=bias("gate_proj", rank),
        )
    if form == "rnn":
        return dataclasses.replace(
            weights,
            joint=matrix("joint_proj", 3 * rank, 2 * rank + hidden, (None, None)),
            joint_bias=bias("joint_proj", 3 * rank),
        )
    return weights


def prepare(
    head: DFlashHead, weights: MarkovWeights, h: Float[Array, "*B H"]
) -> Float[Array, "*B G"] | None:
    """Return what the slots' states add to gate or joint projection, float32; None in vanilla.

    All slots at once, so that a step is left with products of width r alone.
    """
    if head.config.markov_head == "gated":
        return linear_f32(h, weights.gate[:, : h.shape[-1]], weights.gate_bias)
    if head.config.markov_head == "rnn":
        return linear_f32(h, weights.joint[:, -h.shape[-1] :], weights.joint_bias)
    return None


def initial_state(head: DFlashHead, rows: tuple[int, ...]) -> Float[Array, "*B r"]:
    """Return the recurrent state before slot 0 of a block; other forms carry it unused."""
    return jnp.zeros((*rows, head.config.markov_rank), jnp.float32)


def step(
    head: DFlashHead,
    weights: MarkovWeights,
    prepared: Float[Array, "*B G"] | None,
    state: Float[Array, "*B r"],
    previous: Int[Array, "*B"],
) -> tuple[Float[Array, "*B r"], Float[Array, "*B r"]]:
    """Go through one slot.

    Args:
        head: what it is.
        weights: of the sequential head.
        prepared: `prepare`'s for this slot.
        state: the recurrent state, float32.
        previous: target ids of the tokens before the slots' drafts.

    Returns:
        (input of W2 in the weights' dtype, state behind the slot).
    """
    embedded = lookup(weights.w1, previous)
    if prepared is None:
        return embedded, state
    rank, kind = head.config.markov_rank, embedded.dtype
    if head.config.markov_head == "gated":
        gate = prepared + linear_f32(embedded, weights.gate[:, -rank:])
        return (jax.nn.sigmoid(gate) * embedded).astype(kind), state
    # The state's columns are applied to a float32 state: rounding it would build up.
    joint = prepared + linear_f32(embedded, weights.joint[:, rank : 2 * rank])
    joint = joint + linear_f32(state, weights.joint[:, :rank])
    forget, new, out = jnp.split(joint, 3, axis=-1)
    keep = jax.nn.sigmoid(forget)
    return jnp.tanh(out).astype(kind), keep * state + (1 - keep) * jnp.tanh(new)


def correct(
    head: DFlashHead,
    params: DFlashWeights,
    base_logits: Float[Array, "*B b Vd"],
    h: Float[Array, "*B b H"],
    previous_tokens: Int[Array, "*B b"],
) -> Float[Array, "*B b Vd"]:
    """Correct whole blocks whose tokens are known (teacher forcing).

    Args:
        head: what it is.
        params: the head's weights; without a sequential head `base_logits` come back.
        base_logits: float32 logits of the backbone.
        h: its states after the final norm.
        previous_tokens: target ids of the token before each slot's draft.

    Returns:
        float32 logits.
    """
    weights = params.markov
    if weights is None:
        return base_logits
    prepared = prepare(head, weights, h)
    state = initial_state(head, h.shape[:-2])
    if head.config.markov_head != "rnn":
        return base_logits + linear_f32(
            step(head, weights, prepared, state, previous_tokens)[0], weights.w2
        )
    assert prepared is not None
    inputs = []
    for k in range(h.shape[-2]):  # a block has few slots
        given, state = step(head, weights, prepared[..., k, :], state, previous_tokens[..., k])
        inputs.append(given)
    return base_logits + linear_f32(jnp.stack(inputs, axis=-2), weights.w2)


def markov_embedding(
    weights: MarkovWeights, previous_tokens: Int[Array, "*B"], dtype: Any
) -> Float[Array, "*B r"]:
    """Return W1's rows of the previous tokens, as the confidence head gets them."""
    return lookup(weights.w1, previous_tokens).astype(dtype)
