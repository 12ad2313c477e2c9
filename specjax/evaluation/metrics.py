"""Every figure of a record as a pure function of results and seconds; see docs/metrics.md.

A ratio whose denominator is 0 is None ("n/a" in tables, null in JSON), never NaN: a run without
drafts has no acceptance.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

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


def identical(runs: Sequence[Sequence[Result]], reference: Sequence[Result]) -> int:
    """Count requests whose text equals the reference's in every run."""
    return sum(
        all(run[i].token_ids == answer.token_ids for run in runs)
        for i, answer in enumerate(reference)
    )
