"""Confidences set right: rounds verified in full, and temperatures under which they mean it.

What is judged are a head's own drafts under the target it serves, so the temperatures belong to
that pair, to the kind of prompts and to the sampling temperature they were measured on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from specjax.core.errors import PairingError
from specjax.decode.engine import Engine
from specjax.decode.requests import Request
from specjax.evaluation import metrics
from specjax.evaluation.playback import play
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
    found = [each for each in play(engine, requests, on_batch) if each.confidence is not None]
    width = engine.decoder.num_speculative_tokens
    sure = np.asarray([each.confidence for each in found], np.float64).reshape(-1, width)
    sure = np.clip(sure, _EDGE, 1 - _EDGE)
    accepted, judged, prompt = (
        np.asarray([getattr(each, name) for each in found])
        for name in ("accepted", "verified", "request")
    )
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
