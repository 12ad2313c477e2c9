"""One record per measured run: the versioned schema of results.jsonl."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.core.errors import DataError
from specjax.evaluation import metrics
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.lossless import TIE_BOUND, Difference
from specjax.evaluation.measure import Measured, Pass
from specjax.evaluation.shares import StageTimes
from specjax.evaluation.subject import Subject

SCHEMA_VERSION = 1
RESULTS = "results.jsonl"
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Losslessness:
    """How a greedy run compares with the baseline of its dtype.

    Attributes:
        identical: prompts whose text equals the baseline's in every repeat.
        differences: where the others first differ, in the first repeat that does.
        tokens_compared: tokens up to each first difference, in the first repeat.
    """

    identical: int
    differences: list[Difference]
    tokens_compared: int


def rates(passes: Sequence[Pass]) -> list[float | None]:
    """Return output tokens per second, one per repeat."""
    return [metrics.output_tokens_per_second(p.results, p.times) for p in passes]


def decode_rates(passes: Sequence[Pass]) -> list[float | None]:
    """Return tokens per second of decode rounds alone, one per repeat."""
    return [metrics.decode_tokens_per_second(p.results, p.times) for p in passes]


def fastest(baselines: Mapping[str, Measured]) -> str:
    """Return the dtype whose baseline has the highest median output throughput."""
    return max(
        baselines, key=lambda dtype: metrics.spread(rates(baselines[dtype].passes)).median or 0
    )


def record(
    config: EvalConfig,
    subject: Subject,
    measured: Measured,
    baselines: Mapping[str, Measured],
    lossless: Losslessness | None,
    stages: StageTimes | None,
    context: Mapping[str, Any],
) -> Record:
    """Build the record of one run.

    Args:
        config: of the evaluation.
        subject: what was measured.
        measured: the run; the record of the baseline takes its fastest dtype.
        baselines: the baseline by dtype, measured in alternation with it.
        lossless: the comparison of texts, None when sampled.
        stages: time shares, None where they were not taken.
        context: what all records of an evaluation share: `run`, `machine`.
    """
    variant, first = measured.variant, measured.passes[0]
    throughput, decode = rates(measured.passes), decode_rates(measured.passes)
    fast = fastest(baselines)
    against = baselines[fast].passes
    same = baselines[variant.dtype].passes
    speedup = metrics.speedup(throughput, rates(against))
    drafts = metrics.acceptance(first.results)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": context["run"],
        "target": subject.target_name,
        "head": variant.head.name,
        "head_source": None if variant.is_baseline else subject.head_source,
        "num_speculative_tokens": variant.num_speculative_tokens,
        "temperature": config.temperature,
        "concurrency": config.concurrency,
        "dtype": variant.dtype,
        "prompts": len(subject.requests),
        "prompts_sha256": subject.prompts_sha256,
        "repeats": len(measured.passes),
        "output_tokens": metrics.output_tokens(first.results),
        "identical": None if lossless is None else lossless.identical,
        **_differences(lossless, variant.dtype),
        "output_tokens_per_second": metrics.spread(throughput).median,
        "output_tokens_per_second_repeats": throughput,
        "decode_tokens_per_second": metrics.spread(decode).median,
        "decode_tokens_per_second_repeats": decode,
        "decode_tokens_per_second_per_request": metrics.mean_over_requests(
            metrics.per_request_tokens_per_second(p.results) for p in measured.passes
        ),
        "baseline_output_tokens_per_second": {
            dtype: metrics.spread(rates(run.passes)).median for dtype, run in baselines.items()
        },
        "baseline_output_tokens_per_second_repeats": {
            dtype: rates(run.passes) for dtype, run in baselines.items()
        },
        "baseline_dtype": fast,
        "speedup": speedup.median,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "speedup_same_dtype": metrics.speedup(throughput, rates(same)).median,
        "decode_speedup": metrics.speedup(decode, decode_rates(against)).median,
        "mean_acceptance_length": drafts.mean_length,
        "mean_acceptance_length_per_request": metrics.per_request_length(first.results),
        "acceptance_rate": drafts.rate,
        "acceptance_rate_per_request": metrics.per_request_rate(first.results),
        "acceptance_rate_per_position": list(drafts.per_position),
        "acceptance_rate_per_position_conditional": list(drafts.per_position_conditional),
        "draft_rounds": drafts.draft_rounds,
        "drafted_per_position": list(drafts.drafted),
        "accepted_per_position": list(drafts.accepted),
        "rounds": first.times.rounds,
        "prefill_seconds": metrics.spread(p.times.prefill for p in measured.passes).median,
        "decode_seconds": metrics.spread(p.times.decode for p in measured.passes).median,
        "compile_seconds": measured.compile_seconds,
        "time_shares": None if stages is None else _shares(stages, first),
        "notes": list(subject.notes),
        "configuration": dataclasses.asdict(config),
        "machine": context["machine"],
    }


def _differences(lossless: Losslessness | None, dtype: str) -> Record:
    if lossless is None:
        names = ("differing", "near_ties", "near_tie_bound", "flip_rate", "differences")
        return dict.fromkeys(names)
    found = lossless.differences
    return {
        "differing": len(found),
        "near_ties": sum(d.near_tie for d in found),
        "near_tie_bound": TIE_BOUND[dtype],
        "flip_rate": metrics.ratio(len(found), lossless.tokens_compared),
        "differences": [dataclasses.asdict(d) for d in found],
    }


def _shares(stages: StageTimes, first: Pass) -> Record:
    return {
        "draft": stages.draft_share,
        "verify": stages.verify_share,
        "other": stages.other_share,
        "propose_seconds": stages.propose,
        "forward_seconds": stages.forward,
        "commit_seconds": stages.commit,
        "observe_seconds": stages.observe,
        "sum_of_stages_seconds": stages.total,
        "fused_round_seconds": stages.fused,
        "run_round_seconds": metrics.ratio(first.times.decode, first.times.rounds),
        "rounds_timed": stages.rounds,
    }


def finite(value: Any) -> Any:
    """Return a value fit for JSON: infinities and NaN, which JSON lacks, become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        DataError: it cannot be written; nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path} could not be written: {error.strerror}") from None


def append(records: Iterable[Record], directory: Path) -> None:
    """Add records to the directory's results; earlier ones stay, a kill loses none."""
    path = directory / RESULTS
    before = path.read_bytes() if path.exists() else b""
    lines = [json.dumps(finite(row), allow_nan=False, ensure_ascii=False) for row in records]
    write_whole(path, before + "".join(line + "\n" for line in lines).encode())


def read(directory: Path) -> list[Record]:
    """Read the records of a results directory.

    Raises:
        DataError: no results there, a broken line, or a schema of another version.
    """
    path = directory / RESULTS
    if not path.is_file():
        raise DataError(f"no results at {path}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not a line of JSON: {error}") from None
        version = row.get("schema_version") if isinstance(row, dict) else None
        if version != SCHEMA_VERSION:
            raise DataError(f"{path}:{number}: schema_version {version}, expected {SCHEMA_VERSION}")
        rows.append(row)
    return rows
