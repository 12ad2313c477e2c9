"""A cache of the toy target's features, filled in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from specjax.data.chat import Encoded
from specjax.targets.base import Target
from specjax.training.config import TrainerConfig
from specjax.training.features import fill as filling
from specjax.training.features.config import FeaturesConfig
from specjax.training.rows import TrainingData
from tests.training import toy

Loaded = tuple[Target, Any]
WANTS = ((1, 3), (2,))  # the toy head's taps, and the keys of a layer
HELDOUT = toy.make_rows(5, seed=9)


def bfloat16(target: Loaded) -> Loaded:
    return target[0], jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target[1])


def make_data(rows: list[Encoded] | None = None) -> TrainingData:
    return TrainingData(toy.make_batches(rows), toy.make_batches(HELDOUT, 2), "as made")


def make_config(folder: Path, **changes: Any) -> TrainerConfig:
    """A run on the cache in `folder`/cache, with a bfloat16 target."""
    given = {"features": str(folder / "cache"), "target_dtype": "bfloat16", **changes}
    return toy.make_config(folder, **given)


def fill(
    config: TrainerConfig,
    target: Loaded,
    data: TrainingData | None = None,
    wants: tuple[Sequence[int], Sequence[int]] = WANTS,
    **how: Any,
) -> str:
    settings = dataclasses.replace(FeaturesConfig("toy", batch_size=4, chunk_mib=4), **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "_MIB", 1 << 10)  # several files for few tokens
        quiet = Console(quiet=True)
        return filling.fill(config, settings, *target, wants, data or make_data(), quiet)
