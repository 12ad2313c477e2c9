"""Alternation, warm-up, and the draft length reaching the drafter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specjax.core.errors import PairingError
from specjax.decode.requests import Request
from specjax.evaluation import measure
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.measure import Measured, Variant, baseline
from specjax.evaluation.subject import Subject
from tests.evaluation.known import KnownHead


def variant(config: EvalConfig, subject: Subject, count: int, good: int = 2) -> Variant:
    made = measure.speculative(replace(config, num_speculative_tokens=count), subject)
    return replace(made, head=KnownHead(good))


def test_runs_alternate_and_turn_round(subject: Subject, config: EvalConfig) -> None:
    seen: list[str] = []
    variants = [baseline(config, "float32"), variant(config, subject, 3)]
    found = measure.run_alternating(subject, variants, 2, seen.append)
    order = [label for i, label in enumerate(seen) if i == 0 or seen[i - 1] != label]
    plain, drafting = "baseline float32", "eagle3 3 float32"
    assert order == ["warm-up", plain, drafting, plain]
    measured = [each for each in found if isinstance(each, Measured)]
    assert [len(each.passes) for each in measured] == [2, 2]
    for each in measured:
        assert each.compile_seconds >= 0
        for done in each.passes:
            assert done.times.compile == 0
            assert done.peak_bytes is not None and done.peak_bytes > 1e7
            for result in done.results:
                waits = result.start_seconds, result.first_token_seconds, result.finish_seconds
                assert 0 <= waits[0] < waits[1] < waits[2] <= done.times.total
    # Two lanes for four requests: the last two start when a lane is free.
    last = measured[0].passes[0].results
    assert min(r.start_seconds for r in last[2:]) >= min(r.finish_seconds for r in last[:2])


def test_draft_length_reaches_the_drafter(subject: Subject, config: EvalConfig) -> None:
    """F70: with 5 drafts asked for, 5 are verified in every round that has room for them."""
    engine = measure.make_engine(subject, variant(config, subject, 5, good=0))
    for result in engine.generate(subject.requests):
        # One token per round; the last 5 rounds have room for fewer drafts.
        rounds = len(result.token_ids) - 1
        assert result.rounds == rounds
        assert result.drafted == tuple(rounds - 1 - i for i in range(5))
        assert sum(result.accepted) == 0


def test_more_drafts_than_the_head_gives_are_refused(subject: Subject, config: EvalConfig) -> None:
    """F64: never capped in silence."""
    with pytest.raises(PairingError, match="drafts at most 7"):
        measure.make_engine(subject, variant(config, subject, 8))
    endless = replace(variant(config, subject, 64), head=KnownHead(max_tokens=None))
    with pytest.raises(PairingError, match="has 64 positions in all"):
        measure.make_engine(subject, endless)


def test_a_variant_that_fails_leaves_the_others_alone(subject: Subject, config: EvalConfig) -> None:
    drafting = [variant(config, subject, count) for count in (8, 3)]
    variants = [baseline(config, "float32"), *drafting]
    with pytest.raises(PairingError):
        measure.run_alternating(subject, variants, 1)
    found = measure.run_alternating(subject, variants, 1, keep_going=True)
    assert [type(each) for each in found] == [Measured, PairingError, Measured]


def test_warmup_covers_every_prefill_bucket() -> None:
    lengths = [5, 9, 20, 70, 300, 12]
    requests = [Request(tuple(range(n)), 100) for n in lengths]
    chosen = measure.warmup_requests(requests, 64, 3)
    # 5 -> 16; 20 -> 32; 70 -> 64 and 16; 300 -> 64 and 64: nothing new in the others.
    assert [len(r.prompt_ids) for r in chosen] == [5, 20, 70]
    assert all(r.max_new_tokens == 9 for r in chosen)
