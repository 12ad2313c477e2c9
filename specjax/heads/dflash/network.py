"""The network of DFlash and DSpark: what drafting and training both compute.

    c   = norm(fc g; hidden_norm)      g: tapped states of the target; c is computed once for all
    s_0 = E[anchor], s_k = E[mask]     layers and not changed by them
    per layer: w = norm(s); slots ask, keys and values are projections of [c ; w] alike;
               s += attention; s += mlp(norm(s))
    h_k = norm(s_k), logits_k = output h_k

Context j sits at rope position j, slot k at the anchor's position + k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.core.params import ParamSpec
from specjax.heads.base import Borrowed
from specjax.heads.dflash.confidence import ConfidenceWeights, confidence_specs
from specjax.heads.dflash.sequential import MarkovWeights, markov_specs
from specjax.layers.attention import attend
from specjax.layers.blocks.dense import norm_spec
from specjax.layers.embedding import lookup
from specjax.layers.linear import capped, linear, linear_f32
from specjax.layers.norm import rms_norm
from specjax.layers.rope import rope_tables

if TYPE_CHECKING:
    from specjax.heads.dflash.head import DFlashHead

Weight = Any
KeysValues = tuple[jax.Array, jax.Array]


@struct.dataclass
class DFlashWeights:
    """Weights of a block head; None stands for what a variant lacks or borrows.

    Attributes:
        fc: `[H, n * Ht]` fuses the n tapped states (width Ht).
        hidden_norm: `[H]` behind it.
        layers: one tree per decoder layer.
        norm: `[H]` before the output layer.
        markov: DSpark's sequential head.
        confidence: the confidence head.
        embedding: `[V, H]`, or None to borrow the target's.
        output: `[Vd, H]`, or None to borrow the target's.
        d2t: `[Vd]` int32, target id minus draft id; None where both are the same.
        t2d: `[V]` bool, whether a target id can be drafted.
    """

    fc: Weight
    hidden_norm: Weight
    layers: tuple[Any, ...]
    norm: Weight
    markov: MarkovWeights | None = None
    confidence: ConfidenceWeights | None = None
    embedding: Weight = None
    output: Weight = None
    d2t: Weight = None
    t2d: Weight = None


def weight_specs(head: DFlashHead) -> DFlashWeights:
    """Return the head's weight table; all layouts use the same names."""
    hidden = head.geometry.hidden

    def vocab(name: str, size: int) -> ParamSpec:
        return ParamSpec((size, hidden), ("vocab", "embed"), f"{name}.weight")

    def table(name: str, size: int, dtype: str) -> ParamSpec | None:
        if not head.mapped:
            return None
        return ParamSpec((size,), (None,), name, init="zeros", dtype=dtype)

    fused = len(head.taps) * head.target_hidden
    return DFlashWeights(
        fc=ParamSpec((hidden, fused), ("embed", None), "fc.weight"),
        hidden_norm=norm_spec(hidden, "hidden_norm.weight"),
        layers=tuple(head.geometry.abstract(f"layers.{i}.") for i in range(head.config.layers)),
        norm=norm_spec(hidden, "norm.weight"),
        markov=markov_specs(head),
        confidence=confidence_specs(head),
        embedding=vocab("embed_tokens", head.vocab) if head.own_embedding else None,
        output=vocab("lm_head", head.draft_vocab) if head.own_output else None,
        d2t=table("d2t", head.draft_vocab, "int32"),
        t2d=table("t2d", head.vocab, "bool"),
    )


def fuse(
    head: DFlashHead, params: DFlashWeights, taps: Float[Array, "n B S Ht"]
) -> Float[Array, "B S H"]:
    """Return the context states c of tapped states, in the dtype of the head's weights."""
    taps = taps.astype(params.fc.dtype)
    joined = jnp.concatenate([taps[i] for i in range(len(head.taps))], axis=-1)
    return rms_norm(linear(joined, params.fc), params.hidden_norm, head.geometry.eps)


def context_keys(
    head: DFlashHead,
    params: DFlashWeights,
    c: Float[Array, "B S H"],
    positions: Int[Array, "B S"],
) -> tuple[KeysValues, ...]:
    """Return each layer's (keys, values) `[B, N, S, D]` of the context."""
    tables = rope_tables(head.geometry.rope, positions)
    return tuple(head.geometry.keys(weights, c, tables) for weights in params.layers)


def embed_slots(
    head: DFlashHead, params: DFlashWeights, borrowed: Borrowed, tokens: Int[Array, "B Q"]
) -> Float[Array, "B Q H"]:
    """Return the slots' inputs: embeddings, scaled as the target scales its own."""
    rows = lookup(borrowed.embedding if params.embedding is None else params.embedding, tokens)
    if head.embed_scale != 1.0:
        rows = rows * jnp.asarray(head.embed_scale, rows.dtype)
    return rows.astype(params.fc.dtype)


def run_slots(
    head: DFlashHead,
    params: DFlashWeights,
    slots: Float[Array, "B Q H"],
    positions: Int[Array, "B Q"],
    visible: Callable[[int, KeysValues], Sequence[Any]],
    keep: Bool[Array, "B Q"] | None = None,
    *,
    attend: Callable[..., jax.Array] = attend,
    remat: bool = False,
) -> Float[Array, "B Q H"]:
    """Run slots through the layers.

    Args:
        head: what it is.
        params: its weights.
        slots: their inputs; Q slots of one block or of several.
        positions: their rope positions.
        visible: (layer, the slots' own keys and values `[B, N, Q, D]` there) to what they attend
            to: context and slots, as blocks with masks.
        keep: slots whose attention counts; that of others gives nothing. None keeps all.
        attend: takes (queries `[B, M, Q, D]`, what `visible` gave, scale) to `[B, Q, M * D]`.
        remat: compute a layer's activations anew in the backward pass.

    Returns:
        States after the final norm.
    """
    geometry = head.geometry
    tables = rope_tables(geometry.rope, positions)

    def layer(x: jax.Array, weights: Any, i: int) -> jax.Array:
        normed = rms_norm(x, weights.input_norm, geometry.eps)
        own = geometry.keys(weights, normed, tables)
        q = geometry.queries(weights, normed, tables)
        attended = geometry.output(weights, attend(q, visible(i, own), geometry.scale))
        if keep is not None:
            attended = jnp.where(keep[..., None], attended, 0)
        return geometry.finish(weights, x, attended)

    step = jax.checkpoint(layer, static_argnums=2) if remat else layer
    x = slots
    for i, weights in enumerate(params.layers):
        x = step(x, weights, i)
    return rms_norm(x, params.norm, geometry.eps)


def base_logits(
    head: DFlashHead, params: DFlashWeights, borrowed: Borrowed, h: Float[Array, "*B H"]
) -> Float[Array, "*B Vd"]:
    """Return the backbone's float32 logits over what the head can draft, soft-capped."""
    raw = linear_f32(h, borrowed.output if params.output is None else params.output)
    return capped(raw, head.softcap)


def sees_slots(head: DFlashHead, layer: int) -> Bool[Array, "b b"]:
    """Return which slots of its block each slot (rows) sees."""
    at = jnp.arange(head.config.block_size)
    back = at[:, None] - at[None, :]
    seen = back >= 0 if head.causal(layer) else jnp.ones(back.shape, bool)
    window = head.window(layer)
    if window is not None and not head.window_from_anchor:
        seen = seen & (jnp.abs(back) < window)
    return seen


def sees_context(
    head: DFlashHead, layer: int, anchor: Int[Array, "*A"], at: Int[Array, " S"]
) -> Bool[Array, "*A q S"]:
    """Return which context positions the slots of blocks see.

    Args:
        head: what it is.
        layer: which one.
        anchor: position of each block's anchor; its own state is not in the context.
        at: positions of the context.

    Returns:
        One row per slot (q = b), or one for all slots of a block (q = 1).
    """
    seen = at < anchor[..., None, None]
    window = head.window(layer)
    if window is None:
        return seen
    if head.window_from_anchor:
        return seen & (at >= anchor[..., None, None] - window)
    slot = anchor[..., None, None] + jnp.arange(head.config.block_size)[:, None]
    return seen & (at > slot - window)
