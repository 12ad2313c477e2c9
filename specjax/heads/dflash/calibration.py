"""Sequential temperature scaling: confidences whose running products mean what they say.

A scheduler consumes the size of the prefix products `pi_k = c_0 ... c_k`, so that is what is
calibrated, position by position with the earlier ones fixed (DSpark paper, arXiv 2607.05147). A
temperature keeps the order of a position's confidences. Everything here is numpy in float64: it
runs once, on rounds that were verified in full, of texts that the head was not trained on.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

DEFAULT_GRID: tuple[float, ...] = tuple(round(0.25 + 0.05 * i, 2) for i in range(96))
"""0.25 to 5 in steps of 0.05."""


def prefix_products(
    logits: Float[np.ndarray, "n K"], temperatures: Float[np.ndarray, " K"]
) -> Float[np.ndarray, "n K"]:
    """Return each round's `prod_{j <= k} sigmoid(z_j / T_j)`."""
    return np.cumprod(_sigmoid(np.asarray(logits, np.float64) / temperatures), axis=1)


def expected_calibration_error(
    probs: Float[np.ndarray, " n"], labels: Bool[np.ndarray, " n"], bins: int
) -> float:
    """Return the sum over equal-width bins of (share of samples) * |mean prob - mean label|.

    Args:
        probs: predictions in 0..1; bin `floor(p * bins)`, 1 falls into the last.
        labels: what happened.
        bins: their number.
    """
    if not len(probs):
        return 0.0
    at = np.clip(np.floor(probs * bins).astype(int), 0, bins - 1)
    gaps = np.bincount(at, probs - labels, minlength=bins)
    return float(np.abs(gaps).sum() / len(probs))


def sequential_temperatures(
    logits: Float[np.ndarray, "n K"],
    accepted: Int[np.ndarray, " n"],
    judged: Int[np.ndarray, " n"] | None = None,
    grid: tuple[float, ...] | Float[np.ndarray, " G"] = DEFAULT_GRID,
    bins: int = 10,
) -> Float[np.ndarray, " K"]:
    """Choose the temperature of each position.

    Args:
        logits: confidence logits of n rounds.
        accepted: drafts accepted in each.
        judged: drafts of each round whose fate is known (a stop token ends a round early); None:
            all K. Position k is fitted on all rounds that reached judgement there, whether or not
            the drafts before were accepted.
        grid: temperatures to choose from; of equally good ones the first wins.
        bins: of the calibration error that is made least.

    Returns:
        float64 temperatures; 1 at positions that no round judged.

    Raises:
        ValueError: a temperature that is not positive.
    """
    grid = np.asarray(grid, np.float64)
    if grid.min() <= 0:
        raise ValueError("temperatures must be positive")
    logits = np.asarray(logits, np.float64)
    known = _known(logits, judged)
    temperatures = np.ones(logits.shape[1])
    reach = np.ones(logits.shape[0])
    for k in range(logits.shape[1]):
        here, labels = known[:, k], np.asarray(accepted) > k
        errors = [
            expected_calibration_error(
                (reach * _sigmoid(logits[:, k] / t))[here], labels[here], bins
            )
            for t in grid
        ]
        if here.any():
            temperatures[k] = grid[int(np.argmin(errors))]
        reach = reach * _sigmoid(logits[:, k] / temperatures[k])
    return temperatures


def prefix_errors(
    logits: Float[np.ndarray, "n K"],
    accepted: Int[np.ndarray, " n"],
    judged: Int[np.ndarray, " n"] | None,
    temperatures: Float[np.ndarray, " K"],
    bins: int = 10,
) -> Float[np.ndarray, " K"]:
    """Return the calibration error of the prefix product at each position."""
    products = prefix_products(logits, np.asarray(temperatures, np.float64))
    known = _known(products, judged)
    return np.asarray(
        [
            expected_calibration_error(
                products[known[:, k], k], (np.asarray(accepted) > k)[known[:, k]], bins
            )
            for k in range(products.shape[1])
        ]
    )


def _known(
    logits: Float[np.ndarray, "n K"], judged: Int[np.ndarray, " n"] | None
) -> Bool[np.ndarray, "n K"]:
    rounds, width = logits.shape
    limit = np.full(rounds, width) if judged is None else np.asarray(judged)
    return np.arange(width)[None] < limit[:, None]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))  # does not overflow
