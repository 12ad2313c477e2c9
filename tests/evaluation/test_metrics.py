"""Every figure on results made by hand."""

from __future__ import annotations

import json

import pytest

from specjax.decode.requests import Result, RunTimes
from specjax.evaluation import metrics


def result(
    tokens: int,
    drafted: tuple[int, ...] = (),
    accepted: tuple[int, ...] = (),
    seconds: float = 1.0,
    first: int = 0,
) -> Result:
    return Result(
        index=0,
        token_ids=tuple(range(first, first + tokens)),
        finish_reason="length",
        rounds=drafted[0] if drafted else tokens - 1,
        drafted=drafted,
        accepted=accepted,
        first_token_seconds=0.0,
        finish_seconds=seconds,
    )


def times(prefill: float, decode: float, compile_: float = 0.0) -> RunTimes:
    return RunTimes(
        total=prefill + decode + compile_,
        prefill=prefill,
        decode=decode,
        compile=compile_,
        rounds=10,
    )


def test_throughput_pools_tokens_and_is_not_the_mean_of_rates() -> None:
    """F66: 10 tokens in 1 s and 1000 in 10 s are 1010 / 11, not the mean of 10 and 100."""
    both = [result(10, seconds=1.0), result(1000, seconds=10.0)]
    assert metrics.output_tokens_per_second(both, times(0.0, 11.0)) == pytest.approx(1010 / 11)
    per_request = metrics.per_request_tokens_per_second(both)
    assert per_request == pytest.approx((9 / 1 + 999 / 10) / 2)


def test_prompt_time_and_compile_time_stay_out_of_the_decode_rate() -> None:
    """F67: a long prompt and few new tokens."""
    short = [result(16)]
    spent = times(prefill=3.0, decode=1.5, compile_=100.0)
    assert metrics.decode_tokens_per_second(short, spent) == pytest.approx(15 / 1.5)
    assert metrics.output_tokens_per_second(short, spent) == pytest.approx(16 / 4.5)


def test_acceptance_of_positions() -> None:
    """F68: unconditional rates are of all draft rounds, conditional ones of those still in."""
    found = metrics.acceptance(
        [result(20, (10, 10, 9), (8, 4, 1)), result(5, (2, 2, 2), (2, 2, 2))]
    )
    assert found.draft_rounds == 12
    assert found.mean_length == pytest.approx(1 + 19 / 12)
    assert found.rate == pytest.approx(19 / 35)
    assert found.per_position == pytest.approx((10 / 12, 6 / 12, 3 / 12))
    assert found.per_position_conditional == pytest.approx((10 / 12, 6 / 10, 3 / 6))
    assert found.mean_length == pytest.approx(1 + sum(found.per_position))


def test_pooled_and_per_request_means_differ() -> None:
    rows = [result(20, (10,), (1,)), result(5, (2,), (2,))]
    assert metrics.acceptance(rows).rate == pytest.approx(3 / 12)
    assert metrics.per_request_rate(rows) == pytest.approx((0.1 + 1.0) / 2)
    assert metrics.per_request_length(rows) == pytest.approx((1.1 + 2.0) / 2)


@pytest.mark.parametrize("drafted", [(), (0, 0)])
def test_nothing_drafted_is_none_and_valid_json(drafted: tuple[int, ...]) -> None:
    """F69: a run without drafts has no acceptance, and no NaN either."""
    rows = [result(4, drafted, drafted)]
    found = metrics.acceptance(rows)
    assert found.mean_length is None
    assert found.rate is None
    assert found.per_position == found.per_position_conditional == (None,) * len(drafted)
    assert metrics.per_request_rate(rows) is None
    json.dumps([found.mean_length, found.rate, found.per_position], allow_nan=False)


def test_no_requests_at_all() -> None:
    assert metrics.acceptance([]).mean_length is None
    assert metrics.output_tokens_per_second([], times(0.0, 0.0)) is None


def test_speedup_is_paired_by_repeat() -> None:
    """The machine slows down by two in the second repeat: no pair shows it."""
    found = metrics.speedup([200.0, 100.0, 240.0], [100.0, 50.0, 100.0])
    assert found.values == pytest.approx((2.0, 2.0, 2.4))
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 2.0, 2.4))
    assert metrics.speedup([None, 4.0], [1.0, 2.0]).values == pytest.approx((2.0,))
    assert metrics.speedup([1.0], [None]).median is None


def test_identical_counts_a_prompt_only_if_every_run_agrees() -> None:
    reference = [result(3), result(3, first=5)]
    same, other = list(reference), [result(3), result(3, first=6)]
    assert metrics.identical([same, same], reference) == 2
    assert metrics.identical([same, other], reference) == 1
