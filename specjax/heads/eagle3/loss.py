"""EAGLE-3's training-time test: the head unrolled over its own outputs, against the target.

Rows are pairs (g_i, x_{i+1}). At step s every row moves one token on: it is fed x_{i+1+s} and its
own output of step s - 1, sits at rope position i + s, and is compared with the target's
distribution after x_{i+1+s}. The token fed is always the text's (teacher forced), never the
head's own guess, so that input, label and teacher belong to the same prefix. A query of step s
sees the step-0 keys up to its row, and of later steps only its own row's keys.

Nothing that is unrolled depends on logits, so that they are made afterwards, for all steps of a
position together: row i's step s and row i + s's step 0 have the same teacher, computed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.heads import objective, reach
from specjax.heads.base import Borrowed, TrainBatch
from specjax.heads.eagle3.network import (
    Eagle3Weights,
    carry,
    draft_logits,
    fuse,
    layer_inputs,
    layer_output,
)
from specjax.heads.pieces import in_pieces
from specjax.heads.vocabulary import kept_ids
from specjax.layers.attention import KeyBlock, OwnKey, causal_mask
from specjax.layers.linear import capped, linear_f32
from specjax.layers.sampling import first_argmax

if TYPE_CHECKING:
    from specjax.heads.eagle3.head import Eagle3Head


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
class Compared:
    """What is known of every row at every step, `[B, R, T]`.

    Attributes:
        terms: loss terms by name, float32; where not counted, anything.
        accept: `sum min(q, p)` with p over the whole vocabulary, without a gradient.
        pred: the head's most probable draft id.
        best: the target's, among what can be drafted.
        supervised: rows that the loss mask counts.
        counted: those of them that the loss counts; it may leave out what cannot be drafted.
    """

    terms: dict[str, Float[Array, "B R T"]]
    accept: Float[Array, "B R T"]
    pred: Int[Array, "B R T"]
    best: Int[Array, "B R T"]
    supervised: Bool[Array, "B R T"]
    counted: Bool[Array, "B R T"]

    @property
    def correct(self) -> Bool[Array, "B R T"]:
        """Where the head's best token is the target's, among the rows that count."""
        return self.counted & (self.pred == self.best)

    @property
    def accuracy(self) -> Float[Array, " T"]:
        """Share of correct rows per step; those outside the draft vocabulary are wrong."""
        return self.correct.sum((0, 1)) / jnp.maximum(self.supervised.sum((0, 1)), 1)

    @property
    def acceptance(self) -> Float[Array, " T"]:
        """Mean of `accept` per step over the rows that count."""
        accept = jnp.where(self.counted, self.accept, 0.0)
        return accept.sum((0, 1)) / jnp.maximum(self.counted.sum((0, 1)), 1)


def shift(x: Array, by: int) -> Array:
    """Move columns (axis 1) `by` to the left; zeros come in at the end, or at the start if < 0."""
    if by == 0:
        return x
    kept = x[:, by:] if by > 0 else x[:, : max(x.shape[1] + by, 0)]
    new = x.shape[1] - kept.shape[1]
    return jnp.pad(kept, [(0, 0), (0, new) if by > 0 else (new, 0)] + [(0, 0)] * (x.ndim - 2))


def rows_of(batch: TrainBatch, mask_shift: int = 0) -> Rows:
    """Pair the states of a batch with the tokens after them.

    Args:
        batch: texts with the target's states.
        mask_shift: row i counts if token `i + mask_shift` is supervised. The last token of a text
            has no successor, so its row never counts.
    """
    at = jnp.arange(batch.tokens.shape[1])[None]
    real = at < batch.lengths[:, None]
    supervised = shift((batch.loss_mask > 0) & real, mask_shift)
    followed = at < batch.lengths[:, None] - 1
    if batch.documents is not None:
        supervised = supervised & _stays(batch.documents, mask_shift)
        followed = followed & _stays(batch.documents, 1)
    return Rows(
        taps=batch.taps,
        tokens=shift(batch.tokens, 1),
        hidden=shift(batch.hidden, 1),
        counted=supervised & followed,
        positions=_positions(batch),
        lengths=batch.lengths,
        documents=batch.documents,
    )


def _positions(batch: TrainBatch) -> jax.Array:
    if batch.positions is not None:
        return batch.positions
    return jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape)


def _stays(documents: jax.Array, by: int) -> jax.Array:
    """Return which rows are `by` places further on still in their document; padding never is."""
    return (shift(documents + 1, by) == documents + 1) & (documents >= 0)


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


def unroll(
    head: Eagle3Head, params: Eagle3Weights, borrowed: Borrowed, rows: Rows
) -> list[Float[Array, "B R H"]]:
    """Run all steps; gradients flow through all of them.

    Args:
        head: the head.
        params: its weights.
        borrowed: the target's embedding and output layer.
        rows: pairs at step 0.

    Returns:
        The layer's output at each step, before the final norm.
    """
    config = head.config
    at = jnp.arange(rows.tokens.shape[1])[None]

    def step(
        params: Eagle3Weights, borrowed: Borrowed, h: jax.Array, chain: tuple, s: int
    ) -> tuple[jax.Array, jax.Array, tuple]:
        tokens, positions = shift(rows.tokens, s), rows.positions + s
        residual, q, k, v = layer_inputs(head, params, borrowed, h, tokens, positions)
        chain = (*chain, (k, v))
        blocks: list[KeyBlock | OwnKey] = [
            KeyBlock(chain[0][0], chain[0][1], step_keys(rows, s, config.drop_tail)),
            *(OwnKey(k, v) for k, v in chain[1:]),
        ]
        keep = at < rows.lengths[:, None] - s if config.drop_tail else None
        out = layer_output(head, params, residual, q, blocks, keep)
        return out, carry(head, params, out), chain

    if config.remat:
        step = jax.checkpoint(step, static_argnums=(4,))
    h, chain, outs = fuse(head, params, rows.taps), (), []
    for s in range(config.ttt_length):
        out, h, chain = step(params, borrowed, h, chain, s)
        outs.append(out)
    return outs


def compare(
    head: Eagle3Head,
    params: Eagle3Weights,
    borrowed: Borrowed,
    rows: Rows,
    outs: list[Float[Array, "B R H"]],
    *,
    across_documents: bool = False,
) -> Compared:
    """Compare the outputs of all steps with the target, a piece of the positions at a time.

    The target's logits over the whole vocabulary are needed for the best token and for the draft
    vocabulary's share of the distribution; only the kept columns are compared.

    Args:
        head: the head.
        params: its weights.
        borrowed: the target's embedding and output layer.
        rows: pairs at step 0.
        outs: of `unroll`.
        across_documents: let rows whose later steps have left their document count too, where they
            fall on supervised tokens, as speculators does.
    """
    config, kept = head.config, kept_ids(params)
    label, known = objective.draft_labels(params.t2d, shift(rows.tokens, 1))

    steps = len(outs)

    def one(parts: tuple[jax.Array, ...]) -> Any:
        out, state, label = parts
        target, top, mass = teach(head, borrowed, state, kept)

        def step(out: jax.Array) -> objective.Slots:
            draft = draft_logits(head, params, borrowed, out)
            return objective.compare(config.objective, draft, target, label, mass)

        # One after the other: logits of all steps at once would only be moved through memory.
        each = [step(out[..., s, :]) for s in range(steps)]
        best = each[0].best
        in_vocab = (best if kept is None else kept[best]) == top
        slots = jax.tree.map(lambda *x: jnp.stack(x, axis=-1), *each)
        return slots.terms, slots.accept, slots.pred, best, in_vocab

    aligned = jnp.stack([shift(out, -s) for s, out in enumerate(outs)], axis=2)
    width = (0 if kept is None else head.vocab) + (steps + 1) * head.draft_vocab
    found = in_pieces(one, (aligned, rows.hidden, label), rows.counted, width)
    terms, accept, pred, best, in_vocab = found

    def unaligned(x: jax.Array) -> jax.Array:
        return jnp.stack([shift(x[..., s], s) for s in range(steps)], axis=-1)

    def of_steps(x: jax.Array) -> jax.Array:
        return jnp.stack([shift(x, s) for s in range(steps)], axis=-1)

    supervised = of_steps(rows.counted)
    if rows.documents is not None and not across_documents:
        stays = [_stays(rows.documents, s) for s in range(steps)]
        supervised = supervised & jnp.stack(stays, axis=-1)
    counted = supervised
    if config.in_vocab_only:
        counted = counted & of_steps(in_vocab)
    if "hard_ce" in config.objective.terms:
        counted = counted & of_steps(known)
    return Compared(
        terms={name: unaligned(term) for name, term in terms.items()},
        accept=unaligned(accept),
        pred=unaligned(pred),
        best=of_steps(best),
        supervised=supervised,
        counted=counted,
    )


def teach(
    head: Eagle3Head,
    borrowed: Borrowed,
    hidden: Float[Array, "*B H"],
    kept: Int[Array, " Vd"] | None,
) -> tuple[Float[Array, "*B Vd"], Int[Array, "*B"], Float[Array, "*B"] | None]:
    """Return the target's logits of what can be drafted, without a gradient.

    Returns:
        (logits, the most probable of all target ids, share of the whole distribution that can be
        drafted, None where that is all of it).
    """
    logits = jax.lax.stop_gradient(capped(linear_f32(hidden, borrowed.output), head.softcap))
    top = first_argmax(logits)
    if kept is None:
        return logits, top, None
    shown = logits[..., kept]
    rest = jax.nn.logsumexp(shown, axis=-1) - jax.nn.logsumexp(logits, axis=-1)
    return shown, top, jnp.exp(rest)


def weigh(head: Eagle3Head, slots: Compared) -> tuple[Float[Array, ""], list[Float[Array, ""]]]:
    """Return (loss, each step's): step s weighted by `step_loss_decay ** s`."""
    shares = [head.config.step_loss_decay**s for s in range(slots.counted.shape[-1])]
    rule = head.config.objective
    loss, steps, _ = objective.over_steps(rule, slots.terms, slots.counted, shares)
    return loss, steps


def chains(slots: Compared) -> dict[str, jax.Array]:
    """Return how far rounds would get, see `heads.reach`.

    From all supervised rows: what cannot be drafted ends a chain, whatever the loss makes of it.
    """
    alive = slots.supervised[..., 0]
    return reach.metrics(slots.correct, slots.accept, slots.counted, alive)


def chain_accuracy(slots: Compared) -> tuple[jax.Array, jax.Array]:
    """Return speculators' (full_acc, cond_acc), each `[T]`.

    Rows right at all steps so far, over the rows that count now, or over those right before.
    """
    hits = jnp.cumprod(slots.correct.astype(jnp.float32), axis=-1).sum((0, 1))
    counts = slots.counted.sum((0, 1)).astype(jnp.float32)
    before = jnp.concatenate([counts[:1], hits[:-1]])
    return hits / (counts + 1e-5), hits / (before + 1e-5)


def training_loss(
    head: Eagle3Head, params: Eagle3Weights, borrowed: Borrowed, batch: TrainBatch
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Return (loss, metrics) of a batch.

    The metrics are `acceptance` and `accuracy` (both of step 0), those of `heads.reach`,
    `counted` (rows that count at step 0), and per step s `loss_s`, `accuracy_s` and
    `acceptance_s`. A batch without supervised tokens gives 0.
    """
    rows = rows_of(batch, head.config.mask_shift)
    slots = compare(head, params, borrowed, rows, unroll(head, params, borrowed, rows))
    loss, steps = weigh(head, slots)
    metrics = {
        "acceptance": slots.acceptance[0],
        "accuracy": slots.accuracy[0],
        **chains(slots),
        "counted": jnp.sum(slots.counted[..., 0]).astype(jnp.float32),
    }
    for s, step in enumerate(steps):
        metrics[f"loss_{s}"] = step
        metrics[f"accuracy_{s}"] = slots.accuracy[s]
        metrics[f"acceptance_{s}"] = slots.acceptance[s]
    return loss, jax.lax.stop_gradient(metrics)


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
