"""A tiny target, prompts and their baseline texts, made once for all decode tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import targets
from specjax.core.params import init_params
from specjax.decode import Engine, EngineConfig, Request
from tests.decode.scripted import CONFIG, VOCAB


@pytest.fixture(scope="session")
def target() -> targets.Target:
    return targets.from_config(CONFIG)


@pytest.fixture(scope="session")
def params(target: targets.Target) -> Any:
    return init_params(target.specs(), jax.random.key(0), scale=0.3)


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Twenty prompts of 1 to 40 tokens, told apart by their first token."""
    rng = np.random.default_rng(0)
    lengths = [1, 40, *rng.integers(2, 39, 18)]
    return [(i, *map(int, rng.integers(20, VOCAB, n - 1))) for i, n in enumerate(lengths)]


@pytest.fixture(scope="session")
def baseline(
    target: targets.Target, params: Any, prompts: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Forty greedy tokens for every prompt, without speculation and without stop tokens."""
    config = EngineConfig(num_speculative_tokens=0, concurrency=4, capacity=128)
    engine = Engine(target, params, config=config)
    return [r.token_ids for r in engine.generate([Request(p, 40) for p in prompts])]


@pytest.fixture(scope="session")
def script(prompts: list[tuple[int, ...]], baseline: list[tuple[int, ...]]) -> jax.Array:
    """The head's script: every prompt with its true continuation."""
    rows = np.full((len(prompts), 128), VOCAB - 1, np.int32)
    for i, (prompt, answer) in enumerate(zip(prompts, baseline, strict=True)):
        rows[i, : len(prompt) + len(answer)] = prompt + answer
    return jnp.asarray(rows)
