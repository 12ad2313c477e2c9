"""All blocks of a text through the layers in one pass, each seeing its context and itself.

Of the attention of N b slots over S + N b keys only what a block can see is computed: its b
queries against the context's S keys, and against its own b. The context is shared, not copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.heads.base import Borrowed
from specjax.heads.dflash.anchors import Blocks, Texts
from specjax.heads.dflash.network import (
    DFlashWeights,
    KeysValues,
    context_keys,
    embed_slots,
    fuse,
    run_slots,
    sees_context,
    sees_slots,
)
from specjax.layers.attention import KeyBlock, attend

if TYPE_CHECKING:
    from specjax.heads.dflash.head import DFlashHead

_SCORES = 1 << 26  # attention scores that exist at one time


class Seen(NamedTuple):
    """What the blocks of a layer attend to.

    Attributes:
        context: keys and values `[B, n, S, D]`.
        own: keys and values of all slots `[B, n, N b, D]`.
        anchors: `[B, N]`.
        sees: anchors of one block per row `[B]` to the context they see `[B, b or 1, S]`.
        slots: `[b, b]` which slots of its block a slot sees.
    """

    context: KeysValues
    own: KeysValues
    anchors: Int[Array, "B N"]
    sees: Callable[[jax.Array], jax.Array]
    slots: Bool[Array, "b b"]


def visible_context(
    head: DFlashHead, texts: Texts, layer: int, anchor: Int[Array, "*N B"]
) -> Bool[Array, "*N B q S"]:
    """Return which context positions blocks see in a layer; rows are the last axis of `anchor`.

    One row for all slots of a block (q = 1), or one per slot.
    """
    seen = sees_context(head, layer, anchor, jnp.arange(texts.tokens.shape[1]))
    if texts.documents is not None:
        at = jnp.moveaxis(anchor, -1, 0).reshape(anchor.shape[-1], -1)
        home = jnp.take_along_axis(texts.documents, at, axis=1)
        home = jnp.moveaxis(home.reshape(anchor.shape[-1], *anchor.shape[:-1]), 0, -1)
        seen = seen & (home[..., None, None] == texts.documents[:, None, :])
    return seen


def run_blocks(
    head: DFlashHead,
    params: DFlashWeights,
    borrowed: Borrowed,
    texts: Texts,
    blocks: Blocks,
) -> Float[Array, "B N b H"]:
    """Return the states of all slots after the final norm."""
    batch, count, size = blocks.tokens.shape
    context = context_keys(head, params, fuse(head, params, texts.taps), texts.positions)

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(batch, count * size)

    def visible(layer: int, own: KeysValues) -> list[Seen]:
        def sees(anchor: jax.Array) -> jax.Array:
            return visible_context(head, texts, layer, anchor)

        return [Seen(context[layer], own, blocks.anchors, sees, sees_slots(head, layer))]

    hidden = run_slots(
        head,
        params,
        embed_slots(head, params, borrowed, flat(blocks.tokens)),
        flat(blocks.positions),
        visible,
        jnp.repeat(blocks.keep, size, axis=1),
        attend=attend_blocks,
        remat=head.config.remat,
    )
    return hidden.reshape(batch, count, size, -1)


def attend_blocks(
    q: Float[Array, "B M Q D"], seen: list[Seen], scale: float
) -> Float[Array, "B Q F"]:
    """Attend from the slots of all blocks, block by block with the context shared.

    Args:
        q: queries of N blocks, one after another.
        seen: one entry.
        scale: factor on the scores.
    """
    (given,) = seen
    batch, heads, length, _ = q.shape
    count = given.anchors.shape[1]
    size = length // count

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:2], count, size, x.shape[-1]), 2, 0)

    def one(block: Any) -> jax.Array:
        mine, k, v, anchor = block
        keys = [
            KeyBlock(*given.context, given.sees(anchor)),
            KeyBlock(k, v, given.slots[None]),
        ]
        return attend(mine, keys, scale)

    parts = (split(q), *(split(x) for x in given.own), given.anchors.T)
    at_once = max(_SCORES // (batch * heads * size * given.context[0].shape[2]), 1)
    if at_once >= count:
        out = jax.vmap(one)(parts)
    else:  # scores of a group are computed anew in the backward pass
        out = jax.lax.map(jax.checkpoint(one), parts, batch_size=at_once)
    return jnp.moveaxis(out, 0, 1).reshape(batch, length, -1)
