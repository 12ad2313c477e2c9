"""Expected acceptance of a head on texts, without decoding: one teacher-forced pass over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core.errors import ConfigError
from specjax.heads.base import borrow
from specjax.targets.base import Target
from specjax.training.step import HostBatch, features

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What a pass over texts says of a head's rounds, by width.

    Attributes:
        greedy: `[K]` expected tokens of a round of 1 to K drafts, the bonus included, where drafts
            are compared with the target's best token (or the text's, if the head's loss does not
            look at the target's distribution).
        sampled: `[K]` the same where drafts are drawn and accepted by the overlap of both
            distributions; None if the loss does not look at the target's distribution.
        places: supervised tokens in the texts.
    """

    greedy: np.ndarray
    sampled: np.ndarray | None
    places: int


def simulate(
    target: Target,
    target_params: PyTree,
    head: Any,
    params: PyTree,
    batches: Iterable[HostBatch],
) -> Simulated:
    """Run target and head over texts.

    Every supervised place counts as the start of a round. Real rounds start where the one before
    was rejected, which are the harder places, so they are shorter on average.

    Args:
        target: the target.
        target_params: its weights.
        head: one that can be trained.
        params: its weights.
        batches: as `features` takes them.

    Raises:
        ConfigError: a head without a loss.
    """
    if not hasattr(head, "loss"):
        raise ConfigError(
            f"a head of kind {head.name!r} is not trained: it has nothing to simulate"
        )

    @jax.jit
    def run(params: PyTree, weights: PyTree, batch: HostBatch) -> dict[str, jax.Array]:
        found = features(target, weights, head, batch, jax.random.key(0))
        _, metrics = head.loss(params, borrow(target, weights), found)
        reaches = {k: v for k, v in metrics.items() if k.startswith("reach_")}
        return {**reaches, "supervised": jnp.sum(batch["loss_mask"], dtype=jnp.float32)}

    parts = [jax.device_get(run(params, target_params, batch)) for batch in batches]
    weights = np.array([part["supervised"] for part in parts])

    def length(name: str) -> np.ndarray | None:
        if f"reach_{name}" not in parts[0]:
            return None
        values = np.stack([part[f"reach_{name}"] for part in parts])
        return 1 + np.cumsum(weights @ values / max(weights.sum(), 1))

    greedy = length("greedy")
    assert greedy is not None
    return Simulated(greedy, length("probabilistic"), int(weights.sum()))
