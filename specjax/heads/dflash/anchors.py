"""Where blocks start in a text, and what each of their slots reads, predicts and is judged by.

A block drafts as if the text ended at its anchor: it sees tapped states before the anchor, the
anchor's token, and masks. Rows may hold one text each or several packed ones; then anchor, context
and labels of a block belong to one document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.heads.base import TrainBatch

if TYPE_CHECKING:
    from specjax.heads.dflash.head import DFlashHead


@struct.dataclass
class Texts:
    """Texts with the target's states.

    Attributes:
        tokens: `[B, S]` token ids, right padded.
        loss_mask: `[B, S]` true where the token itself is supervised; false on pads.
        hidden: `[B, S, Ht]` the target's states after its final norm.
        taps: `[n, B, S, Ht]` tapped states.
        positions: `[B, S]` rope positions.
        documents: `[B, S]` document of each token where a row packs several (-1: padding), else
            None.
    """

    tokens: Int[Array, "B S"]
    loss_mask: Bool[Array, "B S"]
    hidden: Float[Array, "B S H"]
    taps: Float[Array, "n B S H"]
    positions: Int[Array, "B S"]
    documents: Int[Array, "B S"] | None = None


@struct.dataclass
class Blocks:
    """N blocks per row, of b slots each; a block that is not kept reads position 0 throughout.

    Attributes:
        anchors: `[B, N]` index of each anchor in its row.
        keep: `[B, N]` blocks that exist; the others fill up.
        tokens: `[B, N, b]` inputs: the anchor's token, then masks.
        positions: `[B, N, b]` rope positions.
        previous: `[B, N, b]` the text's token before the one that a slot predicts.
        labels: `[B, N, b]` the text's token that it predicts.
        teacher: `[B, N, b]` index of the target state that predicts the same.
        supervised: `[B, N, b]` slots that count.
    """

    anchors: Int[Array, "B N"]
    keep: Bool[Array, "B N"]
    tokens: Int[Array, "B N b"]
    positions: Int[Array, "B N b"]
    previous: Int[Array, "B N b"]
    labels: Int[Array, "B N b"]
    teacher: Int[Array, "B N b"]
    supervised: Bool[Array, "B N b"]


def texts_of(batch: TrainBatch) -> Texts:
    """Return the texts of a training batch."""
    length = batch.tokens.shape[1]
    at = jnp.broadcast_to(jnp.arange(length)[None], batch.tokens.shape)
    return Texts(
        tokens=batch.tokens,
        loss_mask=(batch.loss_mask > 0) & (at < batch.lengths[:, None]),
        hidden=batch.hidden,
        taps=batch.taps,
        positions=at if batch.positions is None else batch.positions,
        documents=batch.documents,
    )


def candidates(head: DFlashHead, texts: Texts) -> Bool[Array, "B S"]:
    """Return the positions where a block may start, by the head's `anchor_rule`."""
    mask, length = texts.loss_mask, texts.tokens.shape[1]
    if head.config.anchor_rule == "room":
        return mask & (jnp.arange(length) < length - head.config.block_size)
    following = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    if texts.documents is not None:
        same = texts.documents[:, 1:] == texts.documents[:, :-1]
        following = following & jnp.pad(same, ((0, 0), (0, 1)))
    return mask & following


def choose(
    key: Key[Array, ""], allowed: Bool[Array, "B S"], count: int
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """Draw up to `count` of the allowed positions of each row, without replacement.

    Returns:
        (positions ascending, those that exist); the rest are 0. N is `count`, or S where that is
        less.
    """
    length = allowed.shape[1]
    count = min(count, length)
    noise = jnp.where(allowed, jax.random.uniform(key, allowed.shape), -1.0)
    drawn, at = jax.lax.top_k(noise, count)
    at = jnp.sort(jnp.where(drawn >= 0, at, length), axis=1)
    keep = at < length
    return jnp.where(keep, at, 0).astype(jnp.int32), keep


def lay_out(
    head: DFlashHead,
    texts: Texts,
    anchors: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    *,
    across_documents: bool = False,
) -> Blocks:
    """Work out what the slots of blocks read and predict.

    Args:
        head: its slot convention, block size, mask token and rule of supervision.
        texts: the rows.
        anchors: where blocks start.
        keep: blocks that exist.
        across_documents: let slots behind the end of the anchor's document count too, where they
            fall on supervised tokens, as speculators does.
    """
    config, length = head.config, texts.tokens.shape[1]
    slot, there = jnp.arange(config.block_size), keep[..., None]
    place = anchors[..., None] + slot
    label = place + 1 - head.first_slot

    def read(values: Array, index: Array) -> Array:
        index = jnp.where(there, jnp.clip(index, 0, length - 1), 0)
        found = jnp.take_along_axis(values, index.reshape(index.shape[0], -1), axis=1)
        return found.reshape(index.shape)

    start = anchors[..., None]
    counted = read(texts.loss_mask, place if config.supervise == "slot" else label)
    counted = counted & there & (label < length) & (slot >= head.first_slot)
    if texts.documents is not None and not across_documents:
        counted = counted & (read(texts.documents, label) == read(texts.documents, start))
    if config.supervise == "prefix":
        # The slot that predicts nothing does not end the prefix.
        unbroken = counted | (slot < head.first_slot)
        counted = counted & (jnp.cumprod(unbroken.astype(jnp.int32), axis=-1) > 0)
    # Before position 0 there is no state; what stands there never counts, so that it may wrap.
    state = (jnp.minimum(label, length - 1) - 1) % length
    is_anchor = (slot == 0) & there
    return Blocks(
        anchors=anchors,
        keep=keep,
        tokens=jnp.where(is_anchor, read(texts.tokens, start), config.mask_token_id),
        positions=read(texts.positions, start) + slot,
        previous=read(texts.tokens, jnp.maximum(label - 1, start)),
        labels=read(texts.tokens, label),
        teacher=jnp.where(there, state, 0),
        supervised=counted,
    )
