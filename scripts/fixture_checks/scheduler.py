"""Scheduler fixtures: admission of drafts by each rule, and calibration of confidences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from scripts.fixture_checks.fixture import Fixture
from scripts.fixture_checks.outcome import Outcome
from specjax.heads.dflash.calibration import prefix_errors, sequential_temperatures
from specjax.verify import schedule

Given = Mapping[str, np.ndarray]


def compute(fixture: Fixture) -> Outcome:
    """Compute every case, by what it is given."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    for name, value in fixture.inputs.items():
        case, _, part = name.rpartition(".")
        cases.setdefault(case, {})[part] = value
    outcome = Outcome()
    for case, given in cases.items():
        for name, value in _one(given).items():
            outcome.tensors[f"{case}.{name}"] = np.asarray(value)
    return outcome


def _one(given: Given) -> dict[str, Any]:
    if "steps_per_second" in given:
        return throughput(given)
    if "verify_cost" in given:
        return cost(given)
    if "threshold" in given:
        threshold = float(given["threshold"])
        return {"lengths": schedule.above_threshold(jnp.asarray(given["confidence"]), threshold)}
    if "logits" in given:
        return calibration(given)
    return {}


def _survival(given: Given) -> Any:
    confidence = jnp.asarray(given["confidence"])
    return schedule.survival(confidence, jnp.ones(confidence.shape, bool))


def throughput(given: Given) -> dict[str, Any]:
    """Admit by both rules that maximise tokens per second."""
    survival, steps = _survival(given), jnp.asarray(given["steps_per_second"])
    rows = survival.shape[0]
    path = schedule.throughput(survival, steps, rows)
    out = {"survival": survival}
    for name in ("early_stop", "global_argmax"):
        lengths = getattr(schedule, name)(survival, steps, rows)
        out[f"{name}.lengths"] = lengths
        out[f"{name}.throughput"] = path[jnp.sum(lengths)]
    return out


def cost(given: Given) -> dict[str, Any]:
    """Admit by the best number of tokens per cost."""
    survival, rows = _survival(given), given["confidence"].shape[0]
    costs = jnp.asarray(given["draft_cost"] + given["verify_cost"])
    other = int(given.get("other_tokens", 0))
    budget = schedule.best_budget(survival, costs, rows, other)
    return {
        "objective": schedule.objective(survival, costs, rows, other),
        "budget": budget,
        "lengths": schedule.admit_top(survival, budget),
    }


def calibration(given: Given) -> dict[str, Any]:
    """Fit temperatures, and measure before and after."""
    logits, accepted, bins = given["logits"], given["accepted"], int(given["bins"])
    judged = given.get("judged")
    found = sequential_temperatures(logits, accepted, judged, given["grid"], bins)
    before = prefix_errors(logits, accepted, judged, np.ones_like(found), bins)
    after = prefix_errors(logits, accepted, judged, found, bins)
    named = {"temperatures": found, "ece_before": before, "ece_after": after}
    return {name: value.astype(np.float32) for name, value in named.items()}
