"""Sequential temperature scaling against loops, and on confidences with known faults."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.heads.dflash.calibration import (
    expected_calibration_error,
    prefix_errors,
    prefix_products,
    sequential_temperatures,
)

GRID = (0.5, 1.0, 1.5, 2.0, 3.0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rounds(n: int, temperatures: list[float], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rounds whose acceptance follows sigmoid(z / T): the logits are too large by T."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (n, len(temperatures)))
    good = rng.uniform(size=logits.shape) < sigmoid(logits / temperatures)
    return logits, np.cumprod(good, axis=1).sum(1)


def plain_ece(probs: np.ndarray, labels: np.ndarray, bins: int) -> float:
    total = 0.0
    for i in range(bins):
        low, high = i / bins, (i + 1) / bins
        here = [
            (p, y)
            for p, y in zip(probs, labels, strict=True)
            if (low <= p < high) or (i == bins - 1 and p == 1)
        ]
        if here:
            p, y = np.mean(here, axis=0)
            total += len(here) / len(probs) * abs(p - y)
    return total


def test_calibration_error() -> None:
    rng = np.random.default_rng(1)
    probs = np.concatenate([rng.uniform(size=300), [0.0, 1.0, 1.0]])
    labels = rng.uniform(size=303) < 0.4
    assert expected_calibration_error(probs, labels, 8) == pytest.approx(
        plain_ece(probs, labels, 8)
    )
    assert expected_calibration_error(np.ones(4), np.asarray([1, 1, 0, 0]) > 0, 10) == 0.5
    assert expected_calibration_error(np.zeros(0), np.zeros(0, bool), 10) == 0.0


def test_each_position_takes_the_best_of_the_grid_given_those_before() -> None:
    logits, accepted = rounds(200, [2.0, 0.5, 1.5])
    found = sequential_temperatures(logits, accepted, grid=GRID, bins=10)
    reach = np.ones(200)
    for k in range(3):
        errors = [plain_ece(reach * sigmoid(logits[:, k] / t), accepted > k, 10) for t in GRID]
        assert found[k] == GRID[int(np.argmin(errors))]
        reach = reach * sigmoid(logits[:, k] / found[k])
    np.testing.assert_allclose(prefix_products(logits, found)[:, -1], reach)


def test_it_finds_temperatures_and_lowers_the_error_on_other_rounds() -> None:
    true = [2.0, 0.5, 3.0]
    found = sequential_temperatures(*rounds(40_000, true), grid=GRID)
    assert found.tolist() == true
    logits, accepted = rounds(40_000, true, seed=1)
    before = prefix_errors(logits, accepted, None, np.ones(3))
    after = prefix_errors(logits, accepted, None, found)
    assert (after < 0.02).all() and (before > 3 * after).all()


def test_rounds_that_ended_early_are_known_up_to_there_alone() -> None:
    logits, accepted = rounds(400, [1.0, 2.0, 1.5])
    judged = np.where(np.arange(400) % 2 == 0, 1, 3)
    found = sequential_temperatures(logits, accepted, judged, GRID)
    # Behind the cut anything may stand: those rounds have no label there.
    changed, spoiled = accepted.copy(), logits.copy()
    cut = (judged == 1) & (accepted >= 1)
    changed[cut], spoiled[judged == 1, 1:] = 3, 99.0
    np.testing.assert_array_equal(found, sequential_temperatures(spoiled, changed, judged, GRID))
    assert (found != sequential_temperatures(spoiled, changed, None, GRID)).any()
    nothing = sequential_temperatures(logits, accepted, np.full(400, 2), GRID)
    assert nothing[2] == 1.0
    assert prefix_errors(logits, accepted, np.full(400, 2), nothing)[2] == 0.0


def test_the_first_of_equal_temperatures_wins() -> None:
    logits = np.full((4, 1), 50.0)  # certain at any temperature of the grid
    assert sequential_temperatures(logits, np.ones(4, int), grid=(1.25, 0.5, 2.0)).tolist() == [
        1.25
    ]


def test_temperatures_are_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        sequential_temperatures(np.zeros((2, 1)), np.zeros(2, int), grid=(0.0, 1.0))
