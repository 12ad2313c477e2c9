"""Confidences set right: rounds verified in full, and temperatures under which they mean it.

What is judged are a head's own drafts under the target it serves, so the temperatures belong to
that pair, to the kind of prompts and to the sampling temperature they were measured on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from specjax.core.errors import PairingError
from specjax.decode import engine as engine_module
from specjax.decode import round as stages
from specjax.decode.engine import Engine, fit_capacity
from specjax.decode.requests import Request
from specjax.evaluation import metrics
from specjax.heads.dflash.calibration import (
    prefix_errors,
    prefix_products,
    sequential_temperatures,
)

_EDGE = 1e-6  # confidences nearer to 0 or 1 have no logit worth scaling


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Rounds verified in full.

    Attributes:
        logits: `[n, K]` the confidences' logits.
        accepted: `[n]` drafts accepted.
        judged: `[n]` drafts whose fate is known; fewer than K where a text ended.
        prompt: `[n]` index of the request.
    """

    logits: Float[np.ndarray, "n K"]
    accepted: Int[np.ndarray, " n"]
    judged: Int[np.ndarray, " n"]
    prompt: Int[np.ndarray, " n"]

    def of(self, keep: np.ndarray) -> Rounds:
        """Return the rounds where `keep` `[n]` is true."""
        return Rounds(*(getattr(self, field.name)[keep] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Temperatures, and what they change on prompts that they were not fitted on.

    Attributes:
        temperatures: `[K]`.
        before: `[K]` calibration error of the prefix products as the head gives them.
        after: `[K]` with the temperatures.
        fitted: rounds that the temperatures were fitted on.
        heldout: rounds that the errors are of.
    """

    temperatures: Float[np.ndarray, " K"]
    before: Float[np.ndarray, " K"]
    after: Float[np.ndarray, " K"]
    fitted: int
    heldout: int


_propose = functools.partial(jax.jit, static_argnums=0)(stages.propose)


def record_rounds(
    engine: Engine,
    requests: Sequence[Request],
    on_batch: Callable[[int], None] | None = None,
) -> Rounds:
    """Decode requests, as many at a time as there are lanes, and note every round.

    Args:
        engine: of a head with confidences, verifying all drafts.
        requests: the prompts.
        on_batch: called with the number of requests done.

    Raises:
        PairingError: a head without confidences, or an engine that leaves drafts out.
    """
    if not getattr(engine.decoder.head, "has_confidence", False):
        raise PairingError(f"this {engine.decoder.head.name} head gives no confidences")
    if engine.decoder.schedule is not None:
        raise PairingError('calibration needs rounds verified in full: Engine.verification "fixed"')
    lanes, capacity = engine.config.concurrency, fit_capacity(requests)
    parts: list[tuple[np.ndarray, ...]] = []
    for first in range(0, len(requests), lanes):
        batch = list(range(first, min(first + lanes, len(requests))))
        filled = batch + batch[:1] * (lanes - len(batch))  # one shape: a lane too many runs twice
        singles = [engine.prefill(requests[i], capacity) for i in filled]
        state = jax.tree.map(lambda *rows: jnp.concatenate(rows), *singles)
        counts = np.zeros(lanes, int), np.zeros(lanes, int)
        while not bool(state.done.all()):
            running = ~np.asarray(state.done)
            running[len(batch) :] = False
            sure = np.asarray(_propose(engine.decoder, engine.weights, state).confidence)
            state, _ = engine_module._run_rounds(
                engine.decoder, engine.weights, state, jnp.int32(1)
            )
            now = tuple(np.asarray(x).sum(axis=1) for x in (state.accepted, state.drafted))
            accepted, judged = (a - b for a, b in zip(now, counts, strict=True))
            counts = now
            parts.append((sure[running], accepted[running], judged[running]))
            parts[-1] += (np.asarray(filled)[running],)
        if on_batch is not None:
            on_batch(batch[-1] + 1)
    sure, accepted, judged, prompt = (np.concatenate(x) for x in zip(*parts, strict=True))
    sure = np.clip(sure.astype(np.float64), _EDGE, 1 - _EDGE)
    return Rounds(np.log(sure) - np.log1p(-sure), accepted, judged, prompt)


def reliability(rounds: Rounds, bins: int = 10) -> dict[str, Any]:
    """Compare what the head said of its drafts with what became of them.

    Judged is the product of the confidences up to a draft, against whether that draft was accepted.

    Returns:
        What `metrics.reliability` does, over all positions; its calibration error of each position
        as "expected_calibration_error_per_position"; and "rounds".
    """
    width = rounds.logits.shape[1]
    products = prefix_products(rounds.logits, np.ones(width))
    known = np.arange(width) < rounds.judged[:, None]
    accepted = np.arange(width) < rounds.accepted[:, None]
    each = [
        metrics.reliability(products[known[:, k], k], accepted[known[:, k], k], bins)
        for k in range(width)
    ]
    name = "expected_calibration_error"
    return {
        **metrics.reliability(products[known], accepted[known], bins),
        f"{name}_per_position": [found[name] for found in each],
        "rounds": len(rounds.accepted),
    }


def calibrate(rounds: Rounds, bins: int = 20) -> Calibration:
    """Fit temperatures on every other prompt's rounds, and measure on the others."""
    fit, held = rounds.of(rounds.prompt % 2 == 0), rounds.of(rounds.prompt % 2 == 1)
    temperatures = sequential_temperatures(fit.logits, fit.accepted, fit.judged, bins=bins)

    def errors(by: np.ndarray) -> np.ndarray:
        return prefix_errors(held.logits, held.accepted, held.judged, by, bins)

    ones = np.ones_like(temperatures)
    return Calibration(
        temperatures, errors(ones), errors(temperatures), len(fit.accepted), len(held.accepted)
    )
