"""Every figure on results made by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
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
    assert metrics.identical([same, same], reference, (0, 1)) == 2
    assert metrics.identical([same, other], reference, (0, 1)) == 1
    assert metrics.identical([same, other], reference, (0, 0)) == 0  # two turns of one prompt


def test_waiting_leaves_the_queue_out() -> None:
    """Started at 2 s, first token at 2.5 s, all 11 tokens at 4.5 s."""
    late = dataclasses.replace(result(11, seconds=4.5), start_seconds=2.0, first_token_seconds=2.5)
    assert metrics.first_token_seconds([late]) == [0.5]
    assert metrics.latency_seconds([late]) == [2.5]
    assert metrics.seconds_per_token([late]) == [pytest.approx(0.2)]
    assert metrics.seconds_per_token([result(1)]) == [None]
    found = metrics.distribution([None, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert found == pytest.approx({"mean": 3.0, "median": 3.0, "p90": 4.6, "p99": 4.96})
    assert metrics.distribution([None]) is None


def test_bootstrap_intervals_have_the_width_that_theory_gives() -> None:
    """400 prompts of 10 rounds each; the standard error of a mean over prompts is sd / 20."""
    rng = np.random.default_rng(3)
    hits = rng.integers(0, 11, 400)
    rows = [result(20, (10, 10), (int(n), 0)) for n in hits]
    found = metrics.bootstrap(rows, range(400))
    error = hits.std() / 10 / 20
    assert found.mean_length is not None and found.rate is not None and found.per_position
    low, high = found.mean_length
    assert (low + high) / 2 == pytest.approx(1 + hits.mean() / 10, abs=error / 4)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert np.allclose(np.array(found.rate) * 2 + 1, found.mean_length)
    assert found.per_position[1] == (0.0, 0.0)
    # Answers of one prompt stay together: ten prompts of forty answers are far less sure.
    clustered = metrics.bootstrap(sorted(rows, key=lambda r: r.accepted), np.repeat(range(10), 40))
    assert clustered.mean_length is not None
    assert clustered.mean_length[1] - clustered.mean_length[0] > 3 * (high - low)


def test_nothing_to_resample_has_no_interval() -> None:
    """F69: one prompt, or nothing drafted."""
    nothing = metrics.Intervals(None, None, None)
    assert metrics.bootstrap([result(4, (2,), (1,))], (0,)) == nothing
    assert metrics.bootstrap([result(4), result(4)], (0, 1)) == nothing
    assert metrics.bootstrap([result(4, (0,), (0,))] * 2, (0, 1)) == nothing


def test_reliability_by_hand() -> None:
    probs = np.array([0.1, 0.1, 0.9, 0.7, 1.0])
    found = metrics.reliability(probs, np.array([False, True, True, True, True]), 5)
    assert [row["count"] for row in found["bins"]] == [2, 1, 2]
    assert found["bins"][0] == {"count": 2, "confidence": pytest.approx(0.1), "accepted": 0.5}
    by_hand = (2 * 0.4 + 1 * 0.3 + 2 * 0.05) / 5
    assert found["expected_calibration_error"] == pytest.approx(by_hand)
    nothing = metrics.reliability(np.zeros(0), np.zeros(0, bool), 5)
    assert nothing == {"expected_calibration_error": None, "bins": []}
