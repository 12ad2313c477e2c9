"""EAGLE-3's training-time test: the head unrolled over its own outputs, against the target.

Rows are pairs (g_i, x_{i+1}). At step s every row moves one token on: it is fed x_{i+1+s} and its
own output of step s - 1, sits at rope position i + s, and is compared with the target's
distribution after x_{i+1+s}. The token fed is always the text's (teacher forced), never the
head's own guess, so that input, label and teacher belong to the same prefix. A query of step s
sees the step-0 keys up to its row, and of later steps only its own row's keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.heads.base import Borrowed, TrainBatch, refuse_packed
from specjax.heads.eagle3.network import (
    Eagle3Weights,
    carry,
    draft_logits,
    fuse,
    layer_inputs,
    layer_output,
)
from specjax.heads.vocabulary import kept_ids
from specjax.layers import losses
from specjax.layers.attention import KeyBlock, OwnKey, causal_mask
from specjax.layers.linear import capped, linear_f32
from specjax.layers.sampling import overlap

if TYPE_CHECKING:
    from specjax.heads.eagle3.head import Eagle3Head

_TEACHER_ROWS = 256  # rows whose logits over the whole vocabulary exist at one time


@struct.dataclass
class Rows:
    """The pairs of a batch at step 0; step s reads all but the taps s columns further on.

    Attributes:
        taps: `[n, B, R, Ht]` tapped states g_i.
        tokens: `[B, R]` the token after each.
        hidden: `[B, R, Ht]` the state whose distribution is the teacher.
        counted: `[B, R]` bool, rows that count.
        positions: `[B, R]` rope positions.
        lengths: `[B]` rows before padding.
        documents: `[B, R]` document of each row where a row packs several (-1: padding), else None.
    """

    taps: Float[Array, "n B R Ht"]
    tokens: Int[Array, "B R"]
    hidden: Float[Array, "B R Ht"]
    counted: Bool[Array, "B R"]
    positions: Int[Array, "B R"]
    lengths: Int[Array, " B"]
    documents: Int[Array, "B R"] | None = None


@struct.dataclass
class Teacher:
    """The target's distributions on what the head can draft.

    Attributes:
        logits: `[B, R, Vd]` float32.
        probs: `[B, R, Vd]` float32, summing to one over the draft vocabulary.
        mass: `[B, R]` share of the whole distribution that the draft vocabulary holds.
        best: `[B, R]` draft id of the most probable token that can be drafted.
        in_vocab: `[B, R]` whether that is the most probable of all.
    """

    logits: Float[Array, "B R Vd"]
    probs: Float[Array, "B R Vd"]
    mass: Float[Array, "B R"]
    best: Int[Array, "B R"]
    in_vocab: Bool[Array, "B R"]


@struct.dataclass
class Step:
    """One unrolled step: per row `[B, R]`, and its means.

    Attributes:
        hidden: `[B, R, H]` the layer's output before the final norm.
        logits: `[B, R, Vd]` float32.
        pred_ids: most probable draft id.
        position_mask: rows that count in the loss.
        ce: the loss term per row (soft cross entropy for the LK losses), 0 where not counted.
        accept_rate: `sum min(q, p)` with p over the whole vocabulary, 0 where not counted.
        correct: the head's best token is the target's.
        loss: the step's loss, not yet weighted.
        accuracy: share of correct rows; the rows outside the draft vocabulary are wrong.
        mean_accept_rate: mean of `accept_rate` over the rows that count.
    """

    hidden: Float[Array, "B R H"]
    logits: Float[Array, "B R Vd"]
    pred_ids: Int[Array, "B R"]
    position_mask: Bool[Array, "B R"]
    ce: Float[Array, "B R"]
    accept_rate: Float[Array, "B R"]
    correct: Bool[Array, "B R"]
    loss: Float[Array, ""]
    accuracy: Float[Array, ""]
    mean_accept_rate: Float[Array, ""]


def shift(x: Array, by: int) -> Array:
    """Move columns (axis 1) `by` to the left; zeros come in at the end."""
    if by == 0:
        return x
    return jnp.pad(x[:, by:], [(0, 0), (0, min(by, x.shape[1]))] + [(0, 0)] * (x.ndim - 2))


def rows_of(batch: TrainBatch, mask_shift: int = 0) -> Rows:
    """Pair the states of a batch with the tokens after them.

    Args:
        batch: texts with the target's states.
        mask_shift: row i counts if token `i + mask_shift` is supervised. The last token of a text
            has no successor, so its row never counts.
    """
    length = batch.tokens.shape[1]
    at = jnp.arange(length)[None]
    real = at < batch.lengths[:, None]
    supervised = (batch.loss_mask > 0) & real
    return Rows(
        taps=batch.taps,
        tokens=shift(batch.tokens, 1),
        hidden=shift(batch.hidden, 1),
        counted=shift(supervised, mask_shift) & (at < batch.lengths[:, None] - 1),
        positions=jnp.broadcast_to(at, batch.tokens.shape),
        lengths=batch.lengths,
    )


def teach(
    output: Float[Array, "V H"],
    hidden: Float[Array, "B R H"],
    kept: Int[Array, " Vd"] | None,
    softcap: float | None = None,
) -> Teacher:
    """Compute the target's distributions, without a gradient.

    The logits over the whole vocabulary are needed for the best token and the draft vocabulary's
    share; they exist for a few rows at a time, only the kept columns stay.
    """

    def some(x: Float[Array, "R H"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = capped(linear_f32(x, output), softcap)
        shown = logits if kept is None else logits[:, kept]
        return shown, jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1)

    flat = hidden.reshape(-1, hidden.shape[-1])
    count = flat.shape[0]
    if kept is None or count <= _TEACHER_ROWS:
        found = some(flat)  # with all columns kept nothing is saved by going piece by piece
    else:
        padded = jnp.pad(flat, ((0, -count % _TEACHER_ROWS), (0, 0)))
        pieces = jax.lax.map(some, padded.reshape(-1, _TEACHER_ROWS, flat.shape[-1]))
        found = tuple(x.reshape(-1, *x.shape[2:])[:count] for x in pieces)
    logits, total, top = jax.lax.stop_gradient(found)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    rows = hidden.shape[:2]
    return Teacher(
        logits=logits.reshape(*rows, -1),
        probs=jax.nn.softmax(logits, axis=-1).reshape(*rows, -1),
        mass=jnp.exp(jax.nn.logsumexp(logits, axis=-1) - total).reshape(rows),
        best=best.reshape(rows),
        in_vocab=((best if kept is None else kept[best]) == top).reshape(rows),
    )


def step_keys(rows: Rows, step: int, drop_tail: bool) -> Bool[Array, "B R R"]:
    """Return which step-0 keys the queries of a step see. Made anew for each shape it meets."""
    length = rows.tokens.shape[1]
    mask = causal_mask(length)
    if rows.documents is not None:
        documents = rows.documents
        same = (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, None, :]
        return (mask & same) | jnp.eye(length, dtype=bool)
    limit = rows.lengths - (step if drop_tail else 0)
    return mask & (jnp.arange(length)[None, None, :] < limit[:, None, None])


def compare(
    head: Eagle3Head,
    params: Eagle3Weights,
    borrowed: Borrowed,
    out: Float[Array, "B R H"],
    teacher: Teacher,
    counted: Bool[Array, "B R"],
) -> Step:
    """Compare a step's outputs with the teacher's rows, both already aligned."""
    config = head.config
    logits = draft_logits(head, params, borrowed, out)
    mask = counted & teacher.in_vocab if config.in_vocab_only else counted
    per_step = config.loss in ("lk_alpha", "lk_lambda")
    if per_step or config.loss == "soft_ce":
        term = losses.soft_cross_entropy(logits, teacher.probs)
    elif config.loss == "lk_hybrid":
        term = losses.lk_hybrid(logits, teacher.logits, config.lk_eta)
    else:
        term = losses.TERMS[config.loss](logits, teacher.logits)
    seen = logits if per_step else jax.lax.stop_gradient(logits)
    accept = overlap(teacher.probs * teacher.mass[..., None], jax.nn.softmax(seen, axis=-1))

    count = jnp.maximum(jnp.sum(mask), 1)
    loss = losses.masked_sum(term, mask) / (mask.size if config.normalise == "all" else count)
    if config.loss == "lk_alpha":
        loss = losses.lk_alpha(accept, mask, config.lk_kl_scale)
    elif config.loss == "lk_lambda":
        loss = losses.lk_lambda(loss, accept, mask, config.lk_kl_scale, config.lk_kl_decay)
    pred = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    correct = mask & (pred == teacher.best)
    return Step(
        hidden=out,
        logits=logits,
        pred_ids=pred,
        position_mask=mask,
        ce=jnp.where(mask, term, 0.0),
        accept_rate=jnp.where(mask, accept, 0.0),
        correct=correct,
        loss=loss,
        accuracy=jnp.sum(correct) / jnp.maximum(jnp.sum(counted), 1),
        mean_accept_rate=losses.masked_sum(accept, mask) / count,
    )


def unroll(
    head: Eagle3Head, params: Eagle3Weights, borrowed: Borrowed, rows: Rows, teacher: Teacher
) -> list[Step]:
    """Run the training-time test; gradients flow through all of it.

    Args:
        head: the head.
        params: its weights.
        borrowed: the target's embedding and output layer.
        rows: pairs at step 0.
        teacher: the target's distribution of each row at step 0.
    """
    config = head.config
    at = jnp.arange(rows.tokens.shape[1])[None]

    def step(
        params: Eagle3Weights, borrowed: Borrowed, h: jax.Array, chain: tuple, s: int
    ) -> tuple[Step, jax.Array, tuple]:
        tokens, positions = shift(rows.tokens, s), rows.positions + s
        residual, q, k, v = layer_inputs(head, params, borrowed, h, tokens, positions)
        chain = (*chain, (k, v))
        blocks: list[KeyBlock | OwnKey] = [
            KeyBlock(chain[0][0], chain[0][1], step_keys(rows, s, config.drop_tail)),
            *(OwnKey(k, v) for k, v in chain[1:]),
        ]
        keep = at < rows.lengths[:, None] - s if config.drop_tail else None
        out = layer_output(head, params, residual, q, blocks, keep)
        aligned = jax.tree.map(lambda x: shift(x, s), teacher)
        done = compare(head, params, borrowed, out, aligned, shift(rows.counted, s))
        return done, carry(head, params, out), chain

    if config.remat:
        step = jax.checkpoint(step, static_argnums=(4,))
    h, chain, steps = fuse(head, params, rows.taps), (), []
    for s in range(config.ttt_length):
        done, h, chain = step(params, borrowed, h, chain, s)
        steps.append(done)
    return steps


def total_loss(head: Eagle3Head, steps: list[Step]) -> Float[Array, ""]:
    """Add the steps' losses, step s weighted by `step_loss_decay ** s`."""
    weighted = (head.config.step_loss_decay**s * step.loss for s, step in enumerate(steps))
    return sum(weighted, jnp.zeros((), jnp.float32))


def chain_lengths(steps: list[Step]) -> tuple[jax.Array, jax.Array]:
    """Return (tau_greedy, tau_probabilistic): expected tokens of a round, the bonus included.

    1 + the mean over the rows of step 0 that count of `sum_s prod_{j <= s}` of correct, or of
    the acceptance rate.
    """
    count = jnp.maximum(jnp.sum(steps[0].position_mask), 1)

    def mean_length(values: list[jax.Array]) -> jax.Array:
        reach = jnp.cumprod(jnp.stack(values).astype(jnp.float32), axis=0)
        return 1.0 + losses.masked_sum(reach.sum(0), steps[0].position_mask) / count

    return (
        mean_length([step.correct for step in steps]),
        mean_length([step.accept_rate for step in steps]),
    )


def chain_accuracy(steps: list[Step]) -> tuple[jax.Array, jax.Array]:
    """Return speculators' (full_acc, cond_acc), each `[steps]`.

    Rows right at all steps so far, over the rows that count now, or over those right before.
    """
    right = jnp.cumprod(jnp.stack([step.correct for step in steps]).astype(jnp.float32), axis=0)
    hits = right.sum((1, 2))
    counts = jnp.stack([jnp.sum(step.position_mask) for step in steps])
    before = jnp.concatenate([counts[:1].astype(jnp.float32), hits[:-1]])
    return hits / (counts + 1e-5), hits / (before + 1e-5)


def training_loss(
    head: Eagle3Head, params: Eagle3Weights, borrowed: Borrowed, batch: TrainBatch
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Return (loss, metrics) of a batch.

    The metrics are scalars: `acceptance` and `accuracy` (both of step 0), `tau_greedy`,
    `tau_probabilistic`, `counted` (rows that count at step 0), and per step s `loss_s`,
    `accuracy_s` and `acceptance_s`. A batch without supervised tokens gives 0.
    """
    refuse_packed(batch, "Eagle3")
    rows = rows_of(batch, head.config.mask_shift)
    teacher = teach(borrowed.output, rows.hidden, kept_ids(params), head.softcap)
    steps = unroll(head, params, borrowed, rows, teacher)
    greedy, probabilistic = chain_lengths(steps)
    metrics = {
        "acceptance": steps[0].mean_accept_rate,
        "accuracy": steps[0].accuracy,
        "tau_greedy": greedy,
        "tau_probabilistic": probabilistic,
        "counted": jnp.sum(steps[0].position_mask).astype(jnp.float32),
    }
    for s, step in enumerate(steps):
        metrics[f"loss_{s}"] = step.loss
        metrics[f"accuracy_{s}"] = step.accuracy
        metrics[f"acceptance_{s}"] = step.mean_accept_rate
    return total_loss(head, steps), jax.lax.stop_gradient(metrics)


def pack(
    documents: list[tuple[np.ndarray, np.ndarray]], length: int
) -> dict[str, Int[np.ndarray, "1 R"]]:
    """Pack documents into one row in speculators' form.

    Each document loses its first token and mask entry (and its last tapped state), its positions
    start at 1, and padding is document -1 with zeros elsewhere.

    Args:
        documents: (token ids, loss mask) of each, unshifted.
        length: R, columns of the row.

    Raises:
        ValueError: the documents do not fit.
    """
    parts = [(ids[1:], mask[1:]) for ids, mask in documents]
    if sum(len(ids) for ids, _ in parts) > length:
        raise ValueError(f"the documents do not fit into {length} columns")

    def row(pieces: list[np.ndarray], fill: int, dtype: type) -> np.ndarray:
        joined: np.ndarray = np.concatenate(pieces).astype(dtype)
        return np.pad(joined, (0, length - len(joined)), constant_values=fill)[None]

    return {
        "input_ids": row([ids for ids, _ in parts], 0, np.int32),
        "loss_mask": row([mask for _, mask in parts], 0, bool),
        "position_ids": row([1 + np.arange(len(ids)) for ids, _ in parts], 0, np.int32),
        "document_ids": row(
            [np.full(len(ids), i) for i, (ids, _) in enumerate(parts)], -1, np.int32
        ),
    }
