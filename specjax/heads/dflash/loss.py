"""Training DFlash and DSpark: blocks drawn from texts, compared with the text and the target.

All blocks of a batch go through the network in one pass (`block_pass`). Slots are then compared in
pieces, so that logits over a large vocabulary exist for few of them at a time; the backward pass
computes them anew. DSpark's sequential head is teacher forced: it is given the text's tokens. The
confidence head learns the overlap of the head's and the target's distributions, which is the
probability that the draft of a slot is accepted.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.heads import objective, reach
from specjax.heads.base import Borrowed, TrainBatch
from specjax.heads.dflash.anchors import Blocks, Texts, candidates, choose, lay_out, texts_of
from specjax.heads.dflash.block_pass import run_blocks
from specjax.heads.dflash.confidence import confidence_logits
from specjax.heads.dflash.network import DFlashWeights, base_logits
from specjax.heads.dflash.sequential import correct
from specjax.heads.pieces import in_pieces
from specjax.heads.vocabulary import kept_ids
from specjax.layers import losses
from specjax.layers.linear import capped, linear_f32

if TYPE_CHECKING:
    from specjax.heads.dflash.head import DFlashHead


@struct.dataclass
class Compared:
    """What is known of every slot; `[B, N, b]` unless said.

    Attributes:
        terms: loss terms by name, float32.
        accept: the overlap of both distributions, without a gradient.
        pred: the head's most probable draft id.
        best: the target's most probable one among what can be drafted.
        label: draft id of the text's token (of another where it cannot be drafted).
        counted: slots that count in the loss.
        confidence: logits of the confidences, None without a confidence head.
    """

    terms: dict[str, Float[Array, "B N b"]]
    accept: Float[Array, "B N b"]
    pred: Int[Array, "B N b"]
    best: Int[Array, "B N b"]
    label: Int[Array, "B N b"]
    counted: Bool[Array, "B N b"]
    confidence: Float[Array, "B N b"] | None


@struct.dataclass
class Losses:
    """A batch's loss and what it is made of.

    Attributes:
        total: what is minimised.
        parts: each term, reduced, without its factor.
        confidence: the confidence head's, without its factor; 0 without one.
        weights: `[B, N, b]` of the slots, 0 where they do not count.
    """

    total: Float[Array, ""]
    parts: dict[str, Float[Array, ""]]
    confidence: Float[Array, ""]
    weights: Float[Array, "B N b"]


def slot_logits(
    head: DFlashHead,
    params: DFlashWeights,
    borrowed: Borrowed,
    h: Float[Array, "*B b H"],
    previous: Int[Array, "*B b"],
) -> tuple[jax.Array, jax.Array]:
    """Return float32 logits `[*B, b, Vd]`: the backbone's, and the whole head's.

    Args:
        head: what it is.
        params: its weights.
        borrowed: the target's embedding and output layer.
        h: the backbone's states of whole blocks.
        previous: the token before each slot's draft.
    """
    base = base_logits(head, params, borrowed, h)
    return base, correct(head, params, base, h, previous)


def compare(
    head: DFlashHead,
    params: DFlashWeights,
    borrowed: Borrowed,
    texts: Texts,
    blocks: Blocks,
    hidden: Float[Array, "B N b H"],
) -> Compared:
    """Compare the slots of all blocks, a group of blocks at a time."""
    label, known = objective.draft_labels(params.t2d, blocks.labels)
    kept = kept_ids(params)
    rows = borrowed.output if kept is None else borrowed.output[kept]

    def one(block: tuple[jax.Array, ...]) -> objective.Slots:
        h, previous, states, labels = block
        _, draft = slot_logits(head, params, borrowed, h, previous)
        teacher = jax.lax.stop_gradient(capped(linear_f32(states, rows), head.softcap))
        return objective.compare(head.config.objective, draft, teacher, labels)

    batch, count, size = label.shape
    at = blocks.teacher.reshape(batch, -1, 1)
    states = jnp.take_along_axis(texts.hidden, at, axis=1).reshape(batch, count, size, -1)
    parts = (hidden, blocks.previous, states, label)
    found = in_pieces(one, parts, blocks.supervised.any(-1), size * head.draft_vocab)
    assert found.accept is not None and found.best is not None
    counted = blocks.supervised
    if "hard_ce" in found.terms:
        counted = counted & known
    return Compared(
        terms=found.terms,
        accept=found.accept,
        pred=found.pred,
        best=found.best,
        label=label,
        counted=counted,
        confidence=_confidence(head, params, hidden, blocks.previous),
    )


def _confidence(
    head: DFlashHead, params: DFlashWeights, hidden: jax.Array, previous: jax.Array
) -> jax.Array | None:
    if not head.config.confidence:
        return None
    if head.config.detach_confidence:
        others = jax.lax.stop_gradient(dataclasses.replace(params, confidence=None))
        params = dataclasses.replace(others, confidence=params.confidence)
        hidden = jax.lax.stop_gradient(hidden)
    return confidence_logits(head, params, hidden, previous)


def weigh(head: DFlashHead, slots: Compared) -> Losses:
    """Turn compared slots into a loss, as the objective says."""
    rule, mask = head.config.objective, slots.counted
    slot = jnp.arange(mask.shape[-1])
    weights = objective.slot_weights(rule, slot, mask, slots.terms)
    loss, parts = objective.total(rule, slots.terms, mask, weights)
    confidence = jnp.zeros((), jnp.float32)
    if slots.confidence is not None:
        entropy = losses.binary_cross_entropy(slots.confidence, slots.accept)
        confidence = objective.reduce(rule, entropy, mask, weights)
    total = loss + head.config.confidence_factor * confidence
    return Losses(total, parts, confidence, weights)


def block_loss(
    head: DFlashHead,
    params: DFlashWeights,
    borrowed: Borrowed,
    texts: Texts,
    blocks: Blocks,
) -> tuple[Losses, Compared]:
    """Return the loss of given blocks, and what it comes from."""
    hidden = run_blocks(head, params, borrowed, texts, blocks)
    slots = compare(head, params, borrowed, texts, blocks, hidden)
    return weigh(head, slots), slots


def confidence_errors(
    slots: Compared, weights: Float[Array, "B N b"]
) -> dict[str, Float[Array, ""]]:
    """Return weighted means of how far confidences are from acceptance.

    `confidence_abs_error` and `confidence_bias` of the confidence itself, and
    `confidence_cumprod_bias` of its running product, which is what a scheduler consumes.
    """
    assert slots.confidence is not None
    sure, accept = (
        jnp.where(slots.counted, x, 0.0) for x in (jax.nn.sigmoid(slots.confidence), slots.accept)
    )
    gaps = {
        "confidence_abs_error": jnp.abs(sure - accept),
        "confidence_bias": sure - accept,
        "confidence_cumprod_bias": jnp.cumprod(sure, -1) - jnp.cumprod(accept, -1),
    }
    total = jnp.sum(weights)
    whole = jnp.where(total > 0, total, 1.0)
    return {name: jnp.sum(weights * gap) / whole for name, gap in gaps.items()}


def training_loss(
    head: DFlashHead, params: DFlashWeights, borrowed: Borrowed, batch: TrainBatch
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Return (loss, metrics) of a batch, its blocks drawn with the batch's key.

    The metrics are `acceptance` (mean overlap) and `accuracy` (the head's best token is the
    target's best) over the slots that count, those of `heads.reach`, `counted` (slots) and
    `blocks`; per slot k `acceptance_k`; each term's `loss_<term>`; with a confidence head
    `loss_confidence` and `confidence_errors`. A batch without supervised tokens gives 0.
    """
    texts = texts_of(batch)
    anchors = choose(batch.key, candidates(head, texts), head.config.num_anchors)
    blocks = lay_out(head, texts, *anchors)
    loss, slots = block_loss(head, params, borrowed, texts, blocks)
    return loss.total, jax.lax.stop_gradient(_metrics(head, blocks, loss, slots))


def _metrics(
    head: DFlashHead, blocks: Blocks, loss: Losses, slots: Compared
) -> dict[str, jax.Array]:
    first, mask = head.first_slot, slots.counted
    right = (slots.pred == slots.best).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(mask), 1)
    drafted = mask[..., first:]
    overlap = slots.accept[..., first:]
    metrics = {
        "acceptance": losses.masked_sum(slots.accept, mask) / count,
        "accuracy": losses.masked_sum(right, mask) / count,
        **reach.metrics(right[..., first:], overlap, drafted, drafted.any(-1)),
        "counted": jnp.sum(mask).astype(jnp.float32),
        "blocks": jnp.sum(blocks.keep).astype(jnp.float32),
    }
    for k, share in enumerate(acceptance_by_slot(slots)[first:]):
        metrics[f"acceptance_{k}"] = share
    metrics |= {f"loss_{name}": value for name, value in loss.parts.items()}
    if slots.confidence is not None:
        metrics["loss_confidence"] = loss.confidence
        metrics |= confidence_errors(slots, mask.astype(jnp.float32))
    return metrics


def acceptance_by_slot(slots: Compared) -> Float[Array, " b"]:
    """Return the mean overlap at each slot over the blocks where it counts."""
    counts = jnp.maximum(jnp.sum(slots.counted, axis=(0, 1)), 1)
    return jnp.sum(jnp.where(slots.counted, slots.accept, 0.0), axis=(0, 1)) / counts
