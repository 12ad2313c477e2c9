"""Confidence-scheduled verification: which drafts are worth verifying, and a pass of that width.

A head that knows how sure it is lets a round verify its good drafts and leave the others alone.
Admission goes in descending survival (the product of a row's confidences so far) over the whole
batch. It must stay lossless, so no draft is admitted or dropped for what it is, only for what was
known before it was drawn: `early_stop` ends at the first admission that does not pay, `budget`
fixes the number of tokens by the round before, `threshold` looks at each row's confidences in
order. See `verify.schedule` for the rules themselves.

The pass runs at one of a few static widths inside the one compiled round. Its matrix products run
on the admitted tokens packed together (`layers.packing`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import ConfigError
from specjax.layers.packing import Packing
from specjax.targets.base import Cache, Target, TargetOut
from specjax.verify import schedule as rules

PyTree = Any
KINDS = ("threshold", "early_stop", "budget")
_MOST_WIDTHS = 4


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How drafts are admitted, and at which widths they are verified; static.

    Attributes:
        kind: "threshold", "early_stop" or "budget".
        threshold: of "threshold": the least confidence of a draft.
        widths: tokens of a verify pass over the whole batch, ascending; the last holds all.
    """

    kind: str
    threshold: float
    widths: tuple[int, ...]


def choose_widths(batch: int, num: int, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the widths for `batch` lanes of `num` drafts: the given ones, or four evenly spread.

    Raises:
        ConfigError: more than four, or widths that cannot be meant.
    """
    least, most = batch, batch * (num + 1)
    if not given:
        steps = _MOST_WIDTHS - 1
        return tuple(sorted({least + -(-(most - least) * i // steps) for i in range(steps + 1)}))
    widths = tuple(sorted({*given, most}))
    if len(widths) > _MOST_WIDTHS or widths[0] < least or widths[-1] > most:
        raise ConfigError(
            f"Engine.verify_widths {list(given)}: give at most three between {least} (a token per"
            f" lane) and {most} (all drafts), which is added"
        )
    return widths


def admit(
    schedule: Schedule,
    confidence: Float[Array, "B K"],
    limit: Int[Array, " B"],
    running: Bool[Array, " B"],
    costs: Float[Array, " M"],
    before: Float[Array, "B K"],
) -> tuple[Int[Array, " B"], Float[Array, "B K"]]:
    """Return (drafts to verify per row, the survivals of this round).

    Args:
        schedule: the rule.
        confidence: of each draft, given those before it.
        limit: most drafts a row may verify.
        running: rows that take part; each verifies its anchor whatever happens.
        costs: seconds of a round by tokens verified, M = B (K + 1).
        before: survivals of the round before, from which "budget" takes its number of tokens.
    """
    open_ = (jnp.arange(confidence.shape[1]) < limit[:, None]) & running[:, None]
    survival = rules.survival(confidence, open_)
    if schedule.kind == "threshold":
        return rules.above_threshold(
            jnp.where(open_, confidence, -1.0), schedule.threshold
        ), survival
    anchors = jnp.sum(running, dtype=jnp.int32)
    if schedule.kind == "early_stop":
        admitted = jnp.sum(rules.early_stop(survival, 1.0 / costs, anchors))
    else:
        admitted = rules.best_budget(before, costs, anchors)
    # A pass of this width is paid for: fill it, still in the order of survival.
    widths = jnp.asarray(schedule.widths, jnp.int32)
    paid = widths[jnp.searchsorted(widths, anchors + admitted)]
    return rules.admit_top(survival, paid - anchors), survival


def run_width(
    target: Target,
    params: PyTree,
    inputs: Int[Array, "B T"],
    valid: Int[Array, " B"],
    cache: Cache,
    taps: tuple[int, ...],
    size: int,
) -> tuple[TargetOut, Float[Array, "B T V"]]:
    """Run the target over the `valid` positions with products of `size` rows, and spread it all."""
    batch, length = inputs.shape
    if size >= batch * length:
        out = target.forward(params, inputs, valid, cache, taps)
        return out, target.logits(params, out.hidden)
    packing = Packing.of(valid, length, size)
    out = target.forward(params, inputs, valid, cache, taps, packing)
    logits = packing.spread(target.logits(params, out.hidden))
    hidden, streams = packing.spread(out.hidden), jax.vmap(packing.spread)(out.taps)
    return out.replace(hidden=hidden, taps=streams), logits


def run_scheduled(
    schedule: Schedule,
    target: Target,
    params: PyTree,
    inputs: Int[Array, "B T"],
    valid: Int[Array, " B"],
    cache: Cache,
    taps: tuple[int, ...],
) -> tuple[TargetOut, Float[Array, "B T V"]]:
    """Run the target at the smallest width that holds all `valid` positions.

    The cache is only read: branches return updates, and the commit stays outside.
    """
    widths = jnp.asarray(schedule.widths, jnp.int32)
    which = jnp.searchsorted(widths, jnp.sum(valid, dtype=jnp.int32))
    branches = [
        lambda size=size: run_width(target, params, inputs, valid, cache, taps, size)
        for size in schedule.widths
    ]
    return jax.lax.switch(which, branches)
