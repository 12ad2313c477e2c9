"""The stages compiled apart are the round: same states, every stage timed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.engine import Engine, _run_rounds
from specjax.evaluation import measure, shares
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.subject import Subject


@pytest.fixture(scope="module")
def engine(subject: Subject, config: EvalConfig) -> Engine:
    return measure.make_engine(subject, measure.speculative(config, subject))


def test_staged_round_equals_the_fused_one(engine: Engine, subject: Subject) -> None:
    singles = [engine.prefill(request, 64) for request in subject.requests[:2]]
    state = jax.tree.map(lambda *rows: jnp.concatenate(rows), *singles)
    copy = jax.tree.map(jnp.copy, state)
    fused, _ = _run_rounds(engine.decoder, engine.weights, copy, jnp.int32(1))
    staged = shares.staged_round(engine, state, shares._Clock())
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(staged), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def test_shares_are_of_the_sum_of_the_stages(engine: Engine, subject: Subject) -> None:
    found = shares.time_stages(engine, subject.requests, most=3)
    assert found is not None
    assert found.rounds == 3
    assert min(found.propose, found.forward, found.commit, found.observe, found.fused) > 0
    assert found.total == pytest.approx(
        found.propose + found.forward + found.commit + found.observe
    )
    assert found.draft_share + found.verify_share + found.other_share == pytest.approx(1)
    assert found.draft_share * found.total == pytest.approx(found.propose + found.observe)


def test_a_run_too_short_to_time_has_no_shares(engine: Engine, subject: Subject) -> None:
    brief = [dataclasses.replace(r, max_new_tokens=2) for r in subject.requests]
    assert shares.time_stages(engine, brief) is None
