"""Playing a decode round by round is the decode, caches of scanned layers included."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from specjax import targets
from specjax.core.params import init_params
from specjax.decode import Engine, EngineConfig, Request
from specjax.evaluation.playback import play
from specjax.evaluation.shares import time_stages
from specjax.heads.ngram import NgramHead
from specjax.targets.config import TargetConfig
from tests.evaluation.known import CONFIG, VOCAB


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Two lanes of a target of four scanned layers: in their caches the lanes come second."""
    target = targets.from_config(
        {**CONFIG, "num_hidden_layers": 4}, TargetConfig(layer_loop="scan")
    )
    params = init_params(target.specs(), jax.random.key(0), scale=0.3)
    settings = EngineConfig(num_speculative_tokens=2, concurrency=2)
    return Engine(target, params, NgramHead(), (), settings)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    return [Request((*map(int, rng.integers(1, VOCAB, n)),), 9 + n) for n in (4, 7, 5)]


def test_rounds_are_those_of_the_engine(engine: Engine, requests: list[Request]) -> None:
    wanted = engine.generate(requests)
    batches: list[int] = []
    rounds = list(play(engine, requests, batches.append))
    assert batches == [2, 3]
    for i, result in enumerate(wanted):
        own = [each for each in rounds if each.request == i]
        assert tuple(t for each in own for t in each.emitted) == result.token_ids
        assert len(own) == 1 + result.rounds
        assert sum(each.verified for each in own) == sum(result.drafted)
        for each in own:
            assert each.verified <= each.proposed and each.confidence is None
            assert tuple(each.drafts[: each.accepted]) == each.emitted[: each.accepted]


def test_stages_of_several_lanes_are_timed(engine: Engine, requests: list[Request]) -> None:
    assert time_stages(engine, requests, most=2) is not None
