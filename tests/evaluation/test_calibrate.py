"""Calibration: what rounds are noted, and an overconfident head is brought down."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import PairingError
from specjax.decode import Engine, EngineConfig, Request
from specjax.evaluation.calibrate import Rounds, calibrate, record_rounds, reliability
from specjax.heads.ngram import NgramHead
from tests.decode.adversary import VOCAB, tiny
from tests.decode.mixing import Mixed, Script


def test_notes_every_round_of_every_request_once() -> None:
    target, params = tiny("llama")
    rng = np.random.default_rng(0)
    requests = [
        Request(prompt_ids=(10 + i, *rng.integers(3, VOCAB, n).tolist()), max_new_tokens=17 + i)
        for i, n in enumerate((3, 9, 1))
    ]
    plain = Engine(target, params).generate(requests)
    texts = np.zeros((3, 64), np.int32)
    for row, request, answer in zip(texts, requests, plain, strict=True):
        text = (*request.prompt_ids, *answer.token_ids)
        row[: len(text)] = text
    head = Mixed(NgramHead(), "greedy", VOCAB, confident=True)
    script: Any = Script(inner=(), texts=jnp.asarray(texts))
    config = EngineConfig(num_speculative_tokens=4, concurrency=2)
    engine = Engine(target, params, head, script, config)
    wanted = engine.generate(requests)
    rounds = record_rounds(engine, requests)
    for i, result in enumerate(wanted):
        ours = rounds.of(rounds.prompt == i)
        assert len(ours.accepted) == result.rounds
        assert ours.accepted.sum() == sum(result.accepted)
        assert ours.judged.sum() == sum(result.drafted)
    sure = 1 / (1 + np.exp(-rounds.logits))
    assert sure.min() > 0.39 and sure.max() < 1.0

    with pytest.raises(PairingError, match="gives no confidences"):
        record_rounds(Engine(target, params, NgramHead(), (), config), requests)
    scheduled = dataclasses.replace(config, verification="threshold")
    with pytest.raises(PairingError, match="verified in full"):
        record_rounds(Engine(target, params, head, script, scheduled), requests)


def test_an_overconfident_head_is_brought_down() -> None:
    rng = np.random.default_rng(1)
    n, k, true = 6000, 3, 2.5  # the logits are 2.5 times too large
    logits = rng.normal(1.0, 2.0, (n, k))
    hits = rng.random((n, k)) < 1 / (1 + np.exp(-logits / true))
    accepted = np.cumprod(hits, axis=1).sum(axis=1)
    rounds = Rounds(logits, accepted, np.full(n, k), np.arange(n) // 20)
    found = calibrate(rounds)
    np.testing.assert_allclose(found.temperatures, true, atol=1.0)
    assert (found.after < 0.6 * found.before).all()
    assert found.fitted + found.heldout == n


def test_reliability_is_of_the_products_and_of_judged_drafts() -> None:
    """Two rounds of two drafts at sigmoid(0) = 1/2; the second round judged one draft only."""
    rounds = Rounds(np.zeros((2, 2)), np.array([2, 0]), np.array([2, 1]), np.arange(2))
    found = reliability(rounds)
    assert found["rounds"] == 2
    assert found["expected_calibration_error_per_position"] == [0.0, 0.75]
    # Three judged drafts: at 1/2 one of two stood, at 1/4 the only one did.
    assert [row["count"] for row in found["bins"]] == [1, 2]
    assert found["expected_calibration_error"] == pytest.approx(0.75 / 3)
