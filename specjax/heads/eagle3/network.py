"""EAGLE-3's network (arXiv 2503.01840): what drafting and training both compute.

    z   = fc g                       g: tapped states of the target, concatenated
    u   = [norm(E[x]) ; norm(h)]     h: z at first, afterwards the previous step's output
    r   = h + attention(u);  out = r + mlp(norm(r));  logits = output norm(out)

Pair (g_t, x_{t+1}) sits at rope position t and predicts x_{t+2}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.params import ParamSpec
from specjax.heads.base import Borrowed
from specjax.layers.attention import KeyBlock, OwnKey, attend
from specjax.layers.blocks.dense import norm_spec
from specjax.layers.blocks.geometry import Geometry
from specjax.layers.embedding import lookup
from specjax.layers.linear import capped, linear, linear_f32
from specjax.layers.norm import rms_norm
from specjax.layers.rope import rope_tables

if TYPE_CHECKING:
    from specjax.heads.eagle3.head import Eagle3Head

Weight = Any


@struct.dataclass
class Eagle3Layer:
    """The head's only decoder layer; its attention reads 2H inputs.

    Attributes:
        body: `LayerWeights`, or `Gemma4Weights`; its input norm is for embeddings.
        hidden_norm: `[H]` for states.
    """

    body: Any
    hidden_norm: Weight

    @classmethod
    def abstract(cls, geometry: Geometry, prefix: str) -> Eagle3Layer:
        """Return the specs under the layout's prefix, `midlayer.` or `layers.0.`."""
        return cls(
            body=geometry.abstract(prefix),
            hidden_norm=norm_spec(geometry.hidden, f"{prefix}hidden_norm.weight"),
        )


@struct.dataclass
class Eagle3Weights:
    """Weights of an EAGLE-3 head; None stands for what a variant lacks or borrows.

    Attributes:
        fc: `[H, n * Ht]` fuses the n tapped states (width Ht).
        layer: the decoder layer.
        norm: `[H]` before the output layer.
        input_norm: `[n * Ht]` before fc (`norm_before_fc`).
        fc_norm: n of `[Ht]`, one per tapped state (`fc_norm`).
        embedding: `[V, H]`, or None to borrow the target's.
        output: `[Vd, H]`, or None to borrow the target's.
        d2t: `[Vd]` int32, target id minus draft id; None where both are the same.
        t2d: `[V]` bool, whether a target id can be drafted.
    """

    fc: Weight
    layer: Eagle3Layer
    norm: Weight
    input_norm: Weight = None
    fc_norm: tuple[Weight, ...] | None = None
    embedding: Weight = None
    output: Weight = None
    d2t: Weight = None
    t2d: Weight = None


def weight_specs(head: Eagle3Head) -> Eagle3Weights:
    """Return the head's weight table under the names of its layout."""
    hidden, taps, wide = head.geometry.hidden, len(head.taps), head.target_hidden
    config = head.config
    prefix = "midlayer." if head.layout == "safeai" else "layers.0."

    def vocab(name: str, size: int) -> ParamSpec:
        return ParamSpec((size, hidden), ("vocab", "embed"), f"{name}.weight")

    def vector(name: str, size: int) -> ParamSpec:
        return ParamSpec((size,), (None,), f"{name}.weight", init="ones")

    def table(name: str, size: int, dtype: str) -> ParamSpec | None:
        if not head.mapped:
            return None
        return ParamSpec((size,), (None,), name, init="zeros", dtype=dtype)

    fc_norm = tuple(vector(f"fc_norm.{i}", wide) for i in range(taps))
    return Eagle3Weights(
        fc=ParamSpec((hidden, taps * wide), ("embed", None), "fc.weight"),
        layer=Eagle3Layer.abstract(head.geometry, prefix),
        norm=norm_spec(hidden, "norm.weight"),
        input_norm=vector("input_norm", taps * wide) if config.norm_before_fc else None,
        fc_norm=fc_norm if config.fc_norm else None,
        embedding=vocab("embed_tokens", head.vocab) if head.own_embedding else None,
        output=vocab("lm_head", head.draft_vocab) if head.own_output else None,
        d2t=table("d2t", head.draft_vocab, "int32"),
        t2d=table("t2d", head.vocab, "bool"),
    )


def fuse(
    head: Eagle3Head, params: Eagle3Weights, taps: Float[Array, "n B T Ht"]
) -> Float[Array, "B T H"]:
    """Return `fc` of the tapped states, in the dtype of the head's weights."""
    taps = taps.astype(params.fc.dtype)
    chunks = [taps[i] for i in range(len(head.taps))]
    if params.fc_norm is not None:
        eps = head.geometry.eps
        chunks = [rms_norm(x, w, eps) for x, w in zip(chunks, params.fc_norm, strict=True)]
    joined = jnp.concatenate(chunks, axis=-1)
    if params.input_norm is not None:
        joined = rms_norm(joined, params.input_norm, head.geometry.eps)
    return linear(joined, params.fc)


def layer_inputs(
    head: Eagle3Head,
    params: Eagle3Weights,
    borrowed: Borrowed,
    h: Float[Array, "B T H"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (residual `[B, T, H]`, queries, keys, values) of pairs (state, next token)."""
    layer, geometry = params.layer, head.geometry
    table = borrowed.embedding if params.embedding is None else params.embedding
    rows = lookup(table, tokens)
    if head.embed_scale != 1.0:
        rows = rows * jnp.asarray(head.embed_scale, rows.dtype)
    embedded = rms_norm(rows.astype(h.dtype), layer.body.input_norm, geometry.eps)
    normed = rms_norm(h, layer.hidden_norm, geometry.eps)
    joined = jnp.concatenate([embedded, normed], axis=-1)
    tables = rope_tables(geometry.rope, positions)
    q = geometry.queries(layer.body, joined, tables)
    k, v = geometry.keys(layer.body, joined, tables)
    return normed if head.config.norm_before_residual else h, q, k, v


def layer_output(
    head: Eagle3Head,
    params: Eagle3Weights,
    residual: Float[Array, "B T H"],
    q: Float[Array, "B M T D"],
    blocks: Sequence[KeyBlock | OwnKey],
    keep: jax.Array | None = None,
) -> Float[Array, "B T H"]:
    """Attend, add, and run the MLP; where `keep` `[B, T]` is off the attention gives nothing."""
    body, geometry = params.layer.body, head.geometry
    mixed = geometry.output(body, attend(q, blocks, geometry.scale))
    if keep is not None:
        mixed = jnp.where(keep[..., None], mixed, 0)
    return geometry.finish(body, residual, mixed)


def carry(head: Eagle3Head, params: Eagle3Weights, out: Float[Array, "*B H"]) -> jax.Array:
    """Turn a step's output into the state of the next step."""
    return rms_norm(out, params.norm, head.geometry.eps) if head.config.norm_output else out


def draft_logits(
    head: Eagle3Head, params: Eagle3Weights, borrowed: Borrowed, out: Float[Array, "*B H"]
) -> Float[Array, "*B Vd"]:
    """Return float32 logits over what the head can draft, soft-capped where the target's are."""
    output = borrowed.output if params.output is None else params.output
    return capped(linear_f32(rms_norm(out, params.norm, head.geometry.eps), output), head.softcap)
