"""The network of an MTP module (arXiv 2412.19437, section 2.2): what drafting and training share.

    g   = P [norm_e(E[x_{t+1}]) ; norm_h(h_t)]     h: the target's state AFTER its final norm
    out = layer(g);  logits = output layer of norm(out)

Index t predicts x_{t+2} and sits at rope position t. Embedding and output layer are the target's;
the embedding is scaled and the logits are capped where the target does so.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.core.params import ParamSpec
from specjax.core.sharding import Layout
from specjax.heads.base import Borrowed
from specjax.layers.attention import KeyBlock, causal_mask
from specjax.layers.context import Context
from specjax.layers.embedding import lookup
from specjax.layers.layer_kind import LayerKind
from specjax.layers.linear import capped, linear, linear_f32
from specjax.layers.norm import offset_norm, rms_norm
from specjax.layers.rope import rope_tables

if TYPE_CHECKING:
    from specjax.heads.mtp.head import MtpHead

PyTree = Any
Weight = Any


@dataclasses.dataclass(frozen=True)
class Names:
    """What a layout calls the tensors of module i; `{i}` stands for its number.

    Attributes:
        fc: the projection P.
        embedding_norm: norm_e.
        hidden_norm: norm_h.
        norm: the last norm.
        layer: prefix of the decoder layer.
    """

    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    layer: str


SPECULATORS = Names(
    fc="mtp_layers.{i}.input_proj.weight",
    embedding_norm="mtp_layers.{i}.token_layernorm.weight",
    hidden_norm="mtp_layers.{i}.hidden_layernorm.weight",
    norm="mtp_layers.{i}.final_layernorm.weight",
    layer="mtp_layers.{i}.",
)


@struct.dataclass
class ModuleWeights:
    """One module.

    Attributes:
        fc: `[H, 2H]` takes the embedding first, then the state.
        embedding_norm: `[H]`.
        hidden_norm: `[H]`.
        layer: the decoder layer's weights.
        norm: `[H]` before the output layer.
    """

    fc: Weight
    embedding_norm: Weight
    hidden_norm: Weight
    layer: PyTree
    norm: Weight


@struct.dataclass
class MtpWeights:
    """The modules in order of their depth."""

    modules: tuple[ModuleWeights, ...]


def weight_specs(head: MtpHead, names: Names = SPECULATORS, first: int = 0) -> MtpWeights:
    """Return the weight table under a layout's names, modules counted from `first`."""
    hidden = head.hidden

    def norm(name: str) -> ParamSpec:
        start = "zeros" if head.norm_offset else "ones"
        return ParamSpec((hidden,), ("embed",), name, init=start)

    def module(i: int) -> ModuleWeights:
        return ModuleWeights(
            fc=ParamSpec((hidden, 2 * hidden), ("embed", None), names.fc.format(i=i)),
            embedding_norm=norm(names.embedding_norm.format(i=i)),
            hidden_norm=norm(names.hidden_norm.format(i=i)),
            layer=head.layer.abstract(names.layer.format(i=i)),
            norm=norm(names.norm.format(i=i)),
        )

    return MtpWeights(tuple(module(first + i) for i in range(head.modules)))


def module_norm(head: MtpHead, x: Float[Array, "*B H"], weight: Weight) -> Float[Array, "*B H"]:
    """Normalise as the target's norms do: by the weight, or by one plus it."""
    return (offset_norm if head.norm_offset else rms_norm)(x, weight, head.eps)


def layer_input(
    head: MtpHead,
    module: ModuleWeights,
    borrowed: Borrowed,
    states: Float[Array, "B T H"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T H"]:
    """Return g of pairs (state, next token), in the dtype of the module's norms."""
    states = states.astype(module.hidden_norm.dtype)
    rows = lookup(borrowed.embedding, tokens)
    if head.embed_scale != 1.0:
        rows = rows * jnp.asarray(head.embed_scale, rows.dtype)
    rows = rows.astype(states.dtype)
    if head.config.zero_first:
        rows = jnp.where((positions == 0)[..., None], 0, rows)
    parts = [
        module_norm(head, rows, module.embedding_norm),
        module_norm(head, states, module.hidden_norm),
    ]
    return linear(jnp.concatenate(parts, axis=-1), module.fc)


def carry(head: MtpHead, module: ModuleWeights, out: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    """Turn a module's output into the state that is handed on."""
    return module_norm(head, out, module.norm) if head.config.carried == "normed" else out


def draft_logits(
    head: MtpHead, module: ModuleWeights, borrowed: Borrowed, out: Float[Array, "*B H"]
) -> Float[Array, "*B V"]:
    """Return float32 logits of a module's output, soft-capped where the target's are."""
    normed = module_norm(head, out.astype(module.norm.dtype), module.norm)
    return capped(linear_f32(normed, borrowed.output), head.softcap)


def context_at(
    kind: LayerKind,
    lengths: Int[Array, " B"],
    positions: Int[Array, "B T"],
    side: KeyBlock | None = None,
    layout: Layout | None = None,
) -> Context:
    """Return the context of new positions that need not follow the cached ones at once.

    Args:
        kind: the layer that will run.
        lengths: cached positions per row.
        positions: of the new ones; negative ones stand before the text and are seen by none.
        side: keys and values that are neither cached nor new, which the new positions see as its
            mask says.
        layout: how weights lie on a mesh; None on one device.
    """
    ctx = Context(
        lengths=lengths,
        valid=jnp.full_like(lengths, positions.shape[1]),
        positions=positions,
        ropes={rope: rope_tables(rope, positions) for rope in dict.fromkeys(kind.ropes)},
        causal=causal_mask(positions.shape[1]) & (positions >= 0)[:, None, :],
        layout=layout,
    )
    if side is None:
        return ctx
    plain = ctx.attend
    # A layer hands its blocks to this function: one more is all that the side buffer takes.
    return dataclasses.replace(
        ctx, attend=lambda q, blocks, scale: plain(q, [*blocks, side], scale)
    )


def side_block(new: PyTree, mask: Bool[Array, "B t T"], dtype: Any) -> KeyBlock:
    """Return what a layer would have cached as keys and values, in the cache's dtype.

    Args:
        new: what its `run` returned: (keys, values) `[B, N, T, D]`, or latents `[B, T, C]`.
        mask: what queries see of it.
        dtype: of the cache.
    """
    k, v = new if isinstance(new, tuple) else (new[:, None], new[:, None])
    return KeyBlock(k.astype(dtype), v.astype(dtype), mask)


def joined(blocks: list[KeyBlock]) -> KeyBlock | None:
    """Return several blocks as one, None if there is none."""
    if len(blocks) < 2:
        return blocks[0] if blocks else None
    k, v = (jnp.concatenate([getattr(b, part) for b in blocks], axis=2) for part in ("k", "v"))
    return KeyBlock(k, v, jnp.concatenate([b.mask for b in blocks], axis=2))


def last_output(
    kind: LayerKind,
    weights: PyTree,
    x: Float[Array, "B T H"],
    entry: PyTree,
    lengths: Int[Array, " B"],
    last: Int[Array, " B"],
    layout: Layout | None = None,
) -> tuple[Float[Array, "B 1 H"], PyTree]:
    """Run T new positions, of which only the output of one per row is wanted.

    A layer's keys do not depend on its attention, so only that row attends and goes through the
    feed-forward. The first run below is for its keys alone: what they do not need is dead code,
    which the compiler leaves out.

    Args:
        kind: the layer.
        weights: its weights.
        x: inputs.
        entry: its cache.
        lengths: cached positions per row.
        last: index of the wanted row among the T.
        layout: how weights lie on a mesh; None on one device.

    Returns:
        (its output, what `kind.cache.write` takes of all T).
    """
    length = x.shape[1]
    ctx = Context.of(lengths, last + 1, length, kind.ropes, layout=layout)
    _, new = kind.run(weights, x, ctx, entry, 0)
    before = (jnp.arange(length)[None] < last[:, None])[:, None]
    side = side_block(new, before, jax.tree.leaves(entry)[0].dtype)
    ctx = context_at(kind, lengths, (lengths + last)[:, None], side, layout)
    row = jnp.take_along_axis(x, last[:, None, None], axis=1)
    return kind.run(weights, row, ctx, entry, 0)[0], new
