"""Every figure of a record as a pure function of results and seconds; see docs/metrics.md.

A ratio whose denominator is 0 is None ("n/a" in tables, null in JSON), never NaN: a run without
drafts has no acceptance.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from specjax.decode.requests import Result, RunTimes


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, None for nothing out of nothing."""
    return part / whole if whole else None


def output_tokens(results: Iterable[Result]) -> int:
    """Count generated tokens from the generated ids: stop tokens and first tokens included."""
    return sum(len(result.token_ids) for result in results)


def output_tokens_per_second(results: Sequence[Result], times: RunTimes) -> float | None:
    """Generated tokens over the seconds of prefill and decoding, compilation excluded."""
    return ratio(output_tokens(results), times.prefill + times.decode)


def decode_tokens_per_second(results: Sequence[Result], times: RunTimes) -> float | None:
    """Tokens that decode rounds made over their seconds; each first token comes from prefill."""
    return ratio(output_tokens(results) - len(results), times.decode)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What became of the drafts.

    Attributes:
        draft_rounds: rounds that verified at least one draft.
        drafted: drafts verified, per position.
        accepted: drafts accepted and emitted, per position.
        mean_length: tokens per draft round, the bonus included: 1 + accepted / draft rounds.
        rate: accepted / drafted over all positions.
        per_position: accepted at the position / draft rounds (unconditional).
        per_position_conditional: accepted at the position / accepted at the one before it.
    """

    draft_rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    mean_length: float | None
    rate: float | None
    per_position: tuple[float | None, ...]
    per_position_conditional: tuple[float | None, ...]


def acceptance(results: Iterable[Result]) -> Acceptance:
    """Pool the draft counters of all results: every draft weighs the same."""
    rows = list(results)
    drafted = tuple(sum(column) for column in zip(*(r.drafted for r in rows), strict=True))
    accepted = tuple(sum(column) for column in zip(*(r.accepted for r in rows), strict=True))
    # A round that drafts at all drafts at the first position.
    draft_rounds = drafted[0] if drafted else 0
    before = (draft_rounds, *accepted[:-1])
    per_round = ratio(sum(accepted), draft_rounds)
    return Acceptance(
        draft_rounds=draft_rounds,
        drafted=drafted,
        accepted=accepted,
        mean_length=None if per_round is None else 1 + per_round,
        rate=ratio(sum(accepted), sum(drafted)),
        per_position=tuple(ratio(n, draft_rounds) for n in accepted),
        per_position_conditional=tuple(map(ratio, accepted, before)),
    )


def mean_over_requests(values: Iterable[float | None]) -> float | None:
    """Average per-request values: every request weighs the same, those without a value none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def per_request_rate(results: Iterable[Result]) -> float | None:
    """Mean over requests of each request's own acceptance rate."""
    return mean_over_requests(acceptance([result]).rate for result in results)


def per_request_length(results: Iterable[Result]) -> float | None:
    """Mean over requests of each request's own mean acceptance length."""
    return mean_over_requests(acceptance([result]).mean_length for result in results)


def per_request_tokens_per_second(results: Iterable[Result]) -> float | None:
    """Mean over requests of decode tokens over the seconds from first token to end.

    Not a throughput: short answers weigh as much as long ones, and lanes overlap.
    """
    return mean_over_requests(
        ratio(len(r.token_ids) - 1, r.finish_seconds - r.first_token_seconds) for r in results
    )


@dataclasses.dataclass(frozen=True)
class Spread:
    """A figure over repeats.

    Attributes:
        median: what tables show.
        low: the smallest.
        high: the largest.
        values: all of them, in the order of the repeats.
    """

    median: float | None
    low: float | None
    high: float | None
    values: tuple[float, ...]


def spread(values: Iterable[float | None]) -> Spread:
    """Summarise repeats; values that do not exist are left out."""
    known = tuple(value for value in values if value is not None)
    if not known:
        return Spread(None, None, None, ())
    return Spread(statistics.median(known), min(known), max(known), known)


def speedup(rates: Sequence[float | None], baseline: Sequence[float | None]) -> Spread:
    """Summarise rate / baseline, repeat by repeat: drift of the machine cancels within a pair."""
    pairs = zip(rates, baseline, strict=True)
    return spread(None if rate is None or not base else rate / base for rate, base in pairs)


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Summarise figures of single requests: their mean, median, 90th and 99th percentile."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    median, p90, p99 = np.percentile(known, (50, 90, 99))
    return {
        "mean": statistics.fmean(known),
        "median": float(median),
        "p90": float(p90),
        "p99": float(p99),
    }


def first_token_seconds(results: Iterable[Result]) -> list[float]:
    """Per request: from leaving the queue to its first token."""
    return [r.first_token_seconds - r.start_seconds for r in results]


def latency_seconds(results: Iterable[Result]) -> list[float]:
    """Per request: from leaving the queue to its end."""
    return [r.finish_seconds - r.start_seconds for r in results]


def seconds_per_token(results: Iterable[Result]) -> list[float | None]:
    """Per request: seconds from the first token to the end, over the tokens after the first."""
    return [ratio(r.finish_seconds - r.first_token_seconds, len(r.token_ids) - 1) for r in results]


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Bootstrap intervals (low, high) over prompts; None where there is nothing to resample.

    Attributes:
        mean_length: of `Acceptance.mean_length`.
        rate: of `Acceptance.rate`.
        per_position: of `Acceptance.per_position`.
    """

    mean_length: tuple[float, float] | None
    rate: tuple[float, float] | None
    per_position: tuple[tuple[float, float], ...] | None


def bootstrap(
    results: Sequence[Result],
    prompt_of: Sequence[int],
    samples: int = 2000,
    level: float = 0.95,
) -> Intervals:
    """Resample prompts with replacement, all answers of one together, and pool anew each time.

    Args:
        results: of a run.
        prompt_of: which prompt each result answers.
        samples: how often; the random numbers are the same in every call.
        level: the share of samples inside an interval, as many below it as above.
    """
    prompts = sorted(set(prompt_of))
    width = len(results[0].drafted) if results else 0
    if len(prompts) < 2 or not width or not any(r.drafted[0] for r in results):
        return Intervals(None, None, None)
    at = np.searchsorted(prompts, np.asarray(prompt_of))
    drafted, accepted = np.zeros((len(prompts), width)), np.zeros((len(prompts), width))
    np.add.at(drafted, at, np.asarray([r.drafted for r in results]))
    np.add.at(accepted, at, np.asarray([r.accepted for r in results]))
    share = np.full(len(prompts), 1 / len(prompts))
    weights = np.random.default_rng(0).multinomial(len(prompts), share, samples)
    drafted, accepted = weights @ drafted, weights @ accepted
    kept = drafted[:, 0] > 0  # a sample may hold only prompts for which nothing was drafted
    drafted, accepted = drafted[kept], accepted[kept]
    rounds = drafted[:, :1]
    edges = ((1 - level) / 2, (1 + level) / 2)

    def interval(values: np.ndarray) -> tuple[float, float]:
        low, high = np.quantile(values, edges)
        return float(low), float(high)

    return Intervals(
        mean_length=interval(1 + accepted.sum(1) / rounds[:, 0]),
        rate=interval(accepted.sum(1) / drafted.sum(1)),
        per_position=tuple(interval(column) for column in (accepted / rounds).T),
    )


def reliability(
    probs: Float[np.ndarray, " n"], labels: Bool[np.ndarray, " n"], bins: int
) -> dict[str, Any]:
    """Compare predicted probabilities with what happened, in bins of equal width.

    Returns:
        "expected_calibration_error": sum over bins of (share of samples) * |mean prediction - share
        that happened|, None without samples; "bins": of each that is not empty, its "count",
        "confidence" (mean prediction) and "accepted" (share that happened).
    """
    at = np.clip((probs * bins).astype(int), 0, bins - 1)
    rows = [
        {
            "count": int((here := at == i).sum()),
            "confidence": float(probs[here].mean()),
            "accepted": float(labels[here].mean()),
        }
        for i in np.unique(at)
    ]
    gap = sum(row["count"] * abs(row["confidence"] - row["accepted"]) for row in rows)
    return {"expected_calibration_error": ratio(gap, len(probs)), "bins": rows}


def identical(
    runs: Sequence[Sequence[Result]], reference: Sequence[Result], prompt_of: Sequence[int]
) -> int:
    """Count prompts all of whose answers equal the reference's in every run."""
    same = dict.fromkeys(prompt_of, True)
    for i, (answer, prompt) in enumerate(zip(reference, prompt_of, strict=True)):
        same[prompt] &= all(run[i].token_ids == answer.token_ids for run in runs)
    return sum(same.values())
