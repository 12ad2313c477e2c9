"""Alternation, warm-up, and the draft length reaching the drafter."""

from __future__ import annotations

import pytest

from specjax.core.errors import PairingError
from specjax.decode.requests import Request
from specjax.evaluation import measure
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.measure import Variant, baseline
from specjax.evaluation.subject import Subject
from tests.evaluation.known import KnownHead


def variant(subject: Subject, count: int, good: int = 2) -> Variant:
    return Variant("float32", KnownHead(good), subject.head_params, count)


def test_runs_alternate_and_turn_round(subject: Subject, config: EvalConfig) -> None:
    seen: list[str] = []
    variants = [baseline("float32"), variant(subject, 3)]
    settings = measure.engine_settings(config)
    found = measure.run_alternating(subject, variants, settings, 2, seen.append)
    order = [label for i, label in enumerate(seen) if i == 0 or seen[i - 1] != label]
    plain, drafting = "baseline float32", "eagle3 3 float32"
    assert order == ["warm-up", plain, drafting, plain]
    assert [len(each.passes) for each in found] == [2, 2]
    assert all(p.times.compile == 0 for each in found for p in each.passes)
    assert all(each.compile_seconds >= 0 for each in found)


def test_draft_length_reaches_the_drafter(subject: Subject, config: EvalConfig) -> None:
    """F70: with 5 drafts asked for, 5 are verified in every round that has room for them."""
    settings = measure.engine_settings(config)
    engine = measure.make_engine(subject, variant(subject, 5, good=0), settings)
    for result in engine.generate(subject.requests):
        # One token per round; the last 5 rounds have room for fewer drafts.
        rounds = len(result.token_ids) - 1
        assert result.rounds == rounds
        assert result.drafted == tuple(rounds - 1 - i for i in range(5))
        assert sum(result.accepted) == 0


def test_more_drafts_than_the_head_gives_are_refused(subject: Subject, config: EvalConfig) -> None:
    """F64: never capped in silence."""
    with pytest.raises(PairingError, match="drafts at most 7"):
        measure.make_engine(subject, variant(subject, 8), measure.engine_settings(config))


def test_warmup_covers_every_prefill_bucket() -> None:
    lengths = [5, 9, 20, 70, 300, 12]
    requests = [Request(tuple(range(n)), 100) for n in lengths]
    chosen = measure.warmup_requests(requests, 64, 3)
    # 5 -> 16; 20 -> 32; 70 -> 64 and 16; 300 -> 64 and 64: nothing new in the others.
    assert [len(r.prompt_ids) for r in chosen] == [5, 20, 70]
    assert all(r.max_new_tokens == 9 for r in chosen)
