"""Training Gemma 4 MTP: rounds started at every position of a text, unrolled over own states.

Row i is the round that a target would start after i + 1 tokens: the query stands at i + 1 (or at
i), sees the target's keys of positions up to i, and starts from the target's state at i. Step k is
fed the text's token i + 1 + k (never the head's own guess) and the state that step k - 1 left, and
learns token i + 2 + k. Keys and position stay, as they do in a round, so that one mask serves all
steps. Gradients flow through the carried states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.heads import objective, reach
from specjax.heads.base import Borrowed, TrainBatch
from specjax.heads.gemma4_mtp.centroids import cluster_of
from specjax.heads.gemma4_mtp.network import (
    AssistantWeights,
    query_positions,
    step,
    tables_at,
)
from specjax.heads.pieces import in_pieces
from specjax.layers import losses
from specjax.layers.attention import KeyBlock, causal_mask
from specjax.layers.cache.window import WindowKind, window_mask
from specjax.layers.documents import Documents
from specjax.layers.linear import capped, linear_f32

if TYPE_CHECKING:
    from specjax.heads.gemma4_mtp.head import Gemma4MtpHead


@struct.dataclass
class Step:
    """What is known of one step; per row `[B, S]`.

    Attributes:
        terms: loss terms by name, float32; where not counted, anything.
        accept: the overlap of both distributions, without a gradient.
        correct: the head's most probable token is the target's.
        counted: rows that count: the learned token is the assistant's.
        cluster: cross entropy of the cluster that the learned token is in, 0 without clusters.
        found: that cluster is among those whose tokens would be scored.
    """

    terms: dict[str, Float[Array, "B S"]]
    accept: Float[Array, "B S"]
    correct: Bool[Array, "B S"]
    counted: Bool[Array, "B S"]
    cluster: Float[Array, "B S"]
    found: Bool[Array, "B S"]


def shift(x: jax.Array, by: int) -> jax.Array:
    """Move columns (axis 1) `by` to the left; zeros come in at the end."""
    kept = x[:, by:]
    missing = x.shape[1] - kept.shape[1]
    return jnp.pad(kept, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def visible_to_rows(head: Gemma4MtpHead, batch: TrainBatch) -> tuple[KeyBlock, ...]:
    """Return per layer read what the rows see of it: row i the positions of its text up to i."""
    length = batch.tokens.shape[1]
    blocks = []
    for layer, (k, v) in zip(head.keys, batch.keys, strict=True):
        cache = layer.cache
        if isinstance(cache, WindowKind):
            mask = window_mask(length, cache.window)
        else:
            mask = causal_mask(length)
        if batch.documents is not None and batch.positions is not None:
            mask = mask & Documents(batch.documents, batch.positions).together
        blocks.append(KeyBlock(k, v, mask))
    return tuple(blocks)


def compare(
    head: Gemma4MtpHead,
    params: AssistantWeights,
    borrowed: Borrowed,
    hidden: Float[Array, "B S A"],
    target: Float[Array, "B S H"],
    labels: Int[Array, "B S"],
    counted: Bool[Array, "B S"],
) -> Step:
    """Compare a step's states with the target's, a piece at a time; all rows already aligned.

    All tokens are scored, whatever the clusters: a token outside the chosen ones would teach
    nothing. The clusters learn by a loss of their own.
    """
    rule, clusters = head.config.objective, params.clusters
    places = None if clusters is None else cluster_of(clusters)

    def one(parts: tuple[jax.Array, ...]) -> Any:
        y, state, label = parts
        logits = linear_f32(y, params.embedding)
        teacher = jax.lax.stop_gradient(capped(linear_f32(state, borrowed.output), head.softcap))
        slots = objective.compare(rule, logits, teacher, label)
        correct = slots.pred == slots.best
        if places is None or clusters is None:
            none = jnp.zeros(label.shape)
            return slots.terms, slots.accept, correct, none, jnp.ones(label.shape, bool)
        scores, place = linear_f32(y, clusters.centroids), places[label]
        own = jnp.take_along_axis(scores, place[..., None], axis=-1)
        found = jnp.sum(scores > own, axis=-1) < head.config.centroid_top_k
        return slots.terms, slots.accept, correct, losses.hard_cross_entropy(scores, place), found

    done = in_pieces(one, (hidden, target, labels), counted, head.vocab)
    terms, accept, correct, cluster, found = done
    return Step(terms, accept, correct & counted, counted, cluster, found)


def unroll(
    head: Gemma4MtpHead, params: AssistantWeights, borrowed: Borrowed, batch: TrainBatch
) -> list[Step]:
    """Run all steps of all rows; gradients flow through all of it."""
    length = batch.tokens.shape[1]
    at = jnp.arange(length)[None]
    supervised = (batch.loss_mask > 0) & (at < batch.lengths[:, None])
    keys = visible_to_rows(head, batch)
    places = jnp.broadcast_to(at, batch.tokens.shape)
    places = places if batch.positions is None else batch.positions
    positions = query_positions(head, places + 1)
    tables = tables_at(head, positions)

    def run(
        params: AssistantWeights, borrowed: Borrowed, state: jax.Array, k: int
    ) -> tuple[Step, jax.Array]:
        tokens = shift(batch.tokens, 1 + k)
        done = step(head, params, borrowed, tokens, state, tables, keys)
        labels, counted = shift(batch.tokens, 2 + k), shift(supervised, 2 + k)
        if batch.documents is not None:
            counted = counted & (shift(batch.documents, 2 + k) == batch.documents)
        target = shift(batch.hidden, 1 + k)
        return compare(head, params, borrowed, done.hidden, target, labels, counted), done.state

    if head.config.remat:
        run = jax.checkpoint(run, static_argnums=(3,))
    state, steps = batch.hidden, []
    for k in range(head.config.steps):
        done, state = run(params, borrowed, state, k)
        steps.append(done)
    return steps


def training_loss(
    head: Gemma4MtpHead, params: AssistantWeights, borrowed: Borrowed, batch: TrainBatch
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Return (loss, metrics) of a batch.

    The metrics are `acceptance` and `accuracy` (of step 0, all tokens scored), those of
    `heads.reach`, `counted` (rows that count at step 0), per step k `loss_k`, `accuracy_k` and
    `acceptance_k`, and with clusters `loss_clusters` and `clusters_found` (how often the learned
    token's cluster would be scored). A batch without supervised tokens gives 0.
    """
    config, rule = head.config, head.config.objective
    steps = unroll(head, params, borrowed, batch)
    shares = [config.step_loss_decay**k for k in range(config.steps)]
    shares = [share / sum(shares) for share in shares]
    mask = jnp.stack([done.counted for done in steps], axis=-1)
    terms = {
        name: jnp.stack([done.terms[name] for done in steps], axis=-1) for name in steps[0].terms
    }
    total, values, weights = objective.over_steps(rule, terms, mask, shares)
    clusters = jnp.zeros((), jnp.float32)
    metrics: dict[str, jax.Array] = {}
    for k, (share, done) in enumerate(zip(shares, steps, strict=True)):
        count = jnp.maximum(jnp.sum(done.counted), 1)
        clusters += share * objective.reduce(rule, done.cluster, done.counted, weights[..., k])
        metrics[f"loss_{k}"] = values[k]
        metrics[f"accuracy_{k}"] = jnp.sum(done.correct) / count
        metrics[f"acceptance_{k}"] = losses.masked_sum(done.accept, done.counted) / count
    total += config.centroid_factor * clusters
    first = steps[0]
    metrics |= {
        "acceptance": metrics["acceptance_0"],
        "accuracy": metrics["accuracy_0"],
        **reach.metrics(
            jnp.stack([done.correct for done in steps], axis=-1),
            jnp.stack([done.accept for done in steps], axis=-1),
            mask,
        ),
        "counted": jnp.sum(first.counted).astype(jnp.float32),
    }
    if config.centroids:
        count = jnp.maximum(jnp.sum(first.counted), 1)
        metrics["loss_clusters"] = clusters
        metrics["clusters_found"] = jnp.sum(first.found & first.counted) / count
    return total, jax.lax.stop_gradient(metrics)
