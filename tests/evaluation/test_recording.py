"""One recorded run tells what the engine does at every other setting, to the round."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import DataError
from specjax.decode import Engine, EngineConfig, Request
from specjax.decode.costs import Costs
from specjax.evaluation.metrics import acceptance
from specjax.evaluation.prediction import Profile, Setting, predict
from specjax.evaluation.recording import record, time_rounds
from specjax.heads.ngram import NgramHead
from tests.decode.adversary import VOCAB, tiny
from tests.decode.mixing import Mixed, Script

MOST, LANES, CAPACITY = 4, 2, 64


@pytest.fixture(scope="module")
def world() -> tuple[Any, list[Request]]:
    """(K, settings) -> engine of a head that is right by turns; and three requests."""
    target, params = tiny("llama")
    rng = np.random.default_rng(0)
    requests = [
        Request(prompt_ids=(10 + i, *rng.integers(3, VOCAB, n).tolist()), max_new_tokens=17 + i)
        for i, n in enumerate((3, 9, 1))
    ]
    requests.append(Request(prompt_ids=(9, 8), max_new_tokens=1))
    texts = np.zeros((len(requests), CAPACITY), np.int32)
    for row, request, answer in zip(
        texts, requests, Engine(target, params).generate(requests), strict=True
    ):
        text = (*request.prompt_ids, *answer.token_ids)
        row[: len(text)] = text
    head = Mixed(NgramHead(), "greedy", VOCAB, confident=True)
    script: Any = Script(inner=(), texts=jnp.asarray(texts))

    def engine(k: int, **settings: Any) -> Engine:
        config = EngineConfig(k, LANES, capacity=CAPACITY + MOST - k, **settings)
        return Engine(target, params, head if k else None, script if k else (), config)

    return engine, requests


def test_predicts_every_round_of_greedy_runs(world: Any) -> None:
    make, requests = world
    answered: list[None] = []
    recorded, filled = record(make(MOST), requests, True, lambda: answered.append(None))
    assert len(answered) == len(requests)
    assert recorded.tokens.tolist() == [17, 18, 19, 1]
    assert recorded.prefill_seconds > 0
    assert recorded.confidence is not None

    engines = {k: make(k) for k in (0, 2, MOST)}
    seconds = time_rounds(engines, filled)
    assert seconds.keys() == engines.keys()
    assert min(seconds.values()) > 0

    profile = Profile(LANES, seconds)
    for k, engine in engines.items():
        results = engine.generate(requests)
        found = predict(recorded, Setting(k), profile)
        assert engine.times is not None
        assert found.rounds == engine.times.rounds
        if k:
            real = acceptance(results)
            assert (found.draft_rounds, found.accepted) == (real.draft_rounds, real.accepted)
            assert found.mean_acceptance_length == real.mean_length
    assert 0 < sum(found.accepted) < found.verified  # the last: some stood and some fell


@pytest.mark.parametrize("rule", ["threshold", "early_stop"])
def test_predicts_scheduled_rounds(world: Any, rule: Any, tmp_path: Any) -> None:
    make, requests = world
    recorded, _ = record(make(MOST), requests, True)
    costs = Costs(0.5, (2, 10), (1.0, 3.0))
    costs.save(tmp_path / "costs.json")
    engine = make(
        MOST, verification=rule, confidence_threshold=0.7, cost_table=str(tmp_path / "costs.json")
    )
    real = acceptance(engine.generate(requests))
    profile = Profile(LANES, {0: 1.0, MOST: 2.0}, costs)
    found = predict(recorded, Setting(MOST, rule, 0.7), profile)
    assert engine.times is not None
    assert (found.rounds, found.accepted) == (engine.times.rounds, real.accepted)
    assert found.verified < predict(recorded, Setting(MOST), profile).verified


def test_nothing_to_record(world: Any) -> None:
    make, requests = world
    with pytest.raises(DataError, match="nothing to tune"):
        record(make(MOST), requests[-1:], False)
