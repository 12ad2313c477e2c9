"""One record per measured run: the versioned schema of results.jsonl."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.core.errors import DataError, SpecJaxError
from specjax.decode.requests import Result
from specjax.evaluation import metrics
from specjax.evaluation.answers import is_right
from specjax.evaluation.lossless import TIE_BOUND, Difference
from specjax.evaluation.measure import Measured, Pass
from specjax.evaluation.shares import StageTimes
from specjax.evaluation.subject import Subject
from specjax.evaluation.sweep import Cell

SCHEMA_VERSION = 2
RESULTS = "results.jsonl"
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Losslessness:
    """How a greedy run compares with the baseline of its dtype.

    Attributes:
        identical: prompts all of whose answers equal the baseline's in every repeat.
        differences: where the other answers first differ, in the first repeat that does.
        tokens_compared: tokens up to each first difference, in the first repeat.
    """

    identical: int
    differences: list[Difference]
    tokens_compared: int


@dataclasses.dataclass(frozen=True)
class Context:
    """What the records of a sweep share.

    Attributes:
        run: when it was started.
        machine: see `machine.describe`.
    """

    run: str
    machine: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Findings:
    """What was looked at beside the measured runs; None for what was not.

    Attributes:
        lossless: the comparison of texts.
        stages: time shares.
        calibration: how well the head's confidences are calibrated.
        trace: a few texts token by token, see `trace.trace`.
    """

    lossless: Losslessness | None = None
    stages: StageTimes | None = None
    calibration: Record | None = None
    trace: list[Record] | None = None


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
    cell: Cell,
    subject: Subject,
    measured: Measured,
    baselines: Mapping[str, Measured],
    found: Findings,
    context: Context,
) -> Record:
    """Build the record of one run.

    Args:
        cell: what was asked for.
        subject: what was measured.
        measured: the run; the record of the baseline takes its fastest dtype.
        baselines: the baseline by dtype, measured in alternation with it.
        found: what else is known of it.
        context: of the sweep.
    """
    variant = measured.variant
    runs = {dtype: rates(run.passes) for dtype, run in baselines.items()}
    return {
        **_identity(cell, context, subject.target_name),
        "head": variant.head.name,
        "head_source": None if variant.is_baseline else subject.head_source,
        "num_speculative_tokens": variant.num_speculative_tokens,
        "dtype": variant.dtype,
        "error": None,
        "prompts": len(set(subject.groups)),
        "requests": len(subject.requests),
        "prompts_sha256": subject.prompts_sha256,
        "repeats": len(measured.passes),
        **_texts(subject, measured, found.lossless),
        "baseline_dtype": fastest(baselines),
        "baseline_output_tokens_per_second": {
            dtype: metrics.spread(values).median for dtype, values in runs.items()
        },
        "baseline_output_tokens_per_second_repeats": runs,
        **_speed(measured, baselines),
        **_latency(measured),
        **_acceptance(measured, subject.groups),
        "time_shares": None if found.stages is None else _shares(found.stages, measured.passes[0]),
        "calibration": found.calibration,
        "trace": found.trace,
        "notes": list(subject.notes),
    }


_EVERY = (
    *("cell", "baseline_cell", "run", "target", "head", "head_source", "num_speculative_tokens"),
    *("temperature", "concurrency", "prompts", "identical", "output_tokens_per_second", "speedup"),
    *("mean_acceptance_length", "acceptance_rate_per_position", "configuration", "machine"),
)
"""What every record has, that of a failed cell as well."""


def failure(cell: Cell, error: Exception, target: str, context: Context) -> Record:
    """Build the record of a cell that could not be measured.

    Args:
        cell: what was asked for.
        error: why not.
        target: what records call the target.
        context: of the sweep.
    """
    config = cell.config
    words = " ".join(str(error).split())[:500]
    kind = "" if isinstance(error, SpecJaxError) else f"{type(error).__name__}: "
    baseline = cell.is_baseline
    return {
        **_identity(cell, context, target),
        "head": "none" if baseline else config.head,
        "head_source": None if baseline else config.head,
        "num_speculative_tokens": 0 if baseline else config.num_speculative_tokens,
        "dtype": config.dtype,
        "error": kind + words,
        "prompts": None,
        "identical": None,
        "output_tokens_per_second": None,
        "speedup": None,
        "mean_acceptance_length": None,
        "acceptance_rate_per_position": None,
        "notes": [],
    }


def _identity(cell: Cell, context: Context, target: str) -> Record:
    config = cell.config
    return {
        "schema_version": SCHEMA_VERSION,
        "run": context.run,
        "cell": cell.key,
        "baseline_cell": cell.baseline,
        "target": target,
        "prompts_source": config.prompts,
        "chat_template": config.chat_template,
        "enable_thinking": config.enable_thinking,
        "temperature": config.temperature,
        "concurrency": config.concurrency,
        "mesh": config.engine.mesh.name,
        "fingerprints": dict(cell.fingerprints),
        "configuration": dataclasses.asdict(config),
        "machine": dict(context.machine),
    }


def _texts(subject: Subject, measured: Measured, lossless: Losslessness | None) -> Record:
    results = measured.passes[0].results
    known = [(r, a) for r, a in zip(results, subject.answers or (), strict=False) if a is not None]
    decode = subject.decode
    right = sum(is_right(decode(r.token_ids), a) for r, a in known) if decode is not None else 0
    return {
        "output_tokens": metrics.output_tokens(results),
        "identical": None if lossless is None else lossless.identical,
        **_differences(lossless, measured.variant.dtype),
        "accuracy": metrics.ratio(right, len(known)),
        "answers_known": len(known),
    }


def _speed(measured: Measured, baselines: Mapping[str, Measured]) -> Record:
    passes = measured.passes
    against = baselines[fastest(baselines)].passes
    same = baselines[measured.variant.dtype].passes
    throughput, decode = rates(passes), decode_rates(passes)
    speedup = metrics.speedup(throughput, rates(against))
    same_dtype = metrics.speedup(throughput, rates(same))
    return {
        "output_tokens_per_second": metrics.spread(throughput).median,
        "output_tokens_per_second_repeats": throughput,
        "decode_tokens_per_second": metrics.spread(decode).median,
        "decode_tokens_per_second_repeats": decode,
        "decode_tokens_per_second_per_request": metrics.mean_over_requests(
            metrics.per_request_tokens_per_second(p.results) for p in passes
        ),
        "speedup": speedup.median,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "speedup_repeats": list(speedup.values),
        "speedup_same_dtype": same_dtype.median,
        "speedup_same_dtype_low": same_dtype.low,
        "speedup_same_dtype_high": same_dtype.high,
        "decode_speedup": metrics.speedup(decode, decode_rates(against)).median,
        "prefill_seconds": metrics.spread(p.times.prefill for p in passes).median,
        "decode_seconds": metrics.spread(p.times.decode for p in passes).median,
        "compile_seconds": measured.compile_seconds,
        "rounds": passes[0].times.rounds,
        "peak_memory_bytes": max((p.peak_bytes for p in passes if p.peak_bytes), default=None),
    }


def _latency(measured: Measured) -> Record:
    def over_all(of: Callable[[list[Result]], Sequence[float | None]]) -> dict[str, float] | None:
        return metrics.distribution(v for p in measured.passes for v in of(p.results))

    return {
        "time_to_first_token_seconds": over_all(metrics.first_token_seconds),
        "time_per_output_token_seconds": over_all(metrics.seconds_per_token),
        "latency_seconds": over_all(metrics.latency_seconds),
    }


def _acceptance(measured: Measured, groups: Sequence[int]) -> Record:
    results = measured.passes[0].results
    drafts = metrics.acceptance(results)
    intervals = metrics.bootstrap(results, groups)
    return {
        "mean_acceptance_length": drafts.mean_length,
        "mean_acceptance_length_interval": intervals.mean_length,
        "mean_acceptance_length_per_request": metrics.per_request_length(results),
        "acceptance_rate": drafts.rate,
        "acceptance_rate_interval": intervals.rate,
        "acceptance_rate_per_request": metrics.per_request_rate(results),
        "acceptance_rate_per_position": list(drafts.per_position),
        "acceptance_rate_per_position_interval": intervals.per_position,
        "acceptance_rate_per_position_conditional": list(drafts.per_position_conditional),
        "draft_rounds": drafts.draft_rounds,
        "drafted_tokens": measured.variant.num_speculative_tokens * sum(r.rounds for r in results),
        "verified_tokens": sum(drafts.drafted),
        "accepted_tokens": sum(drafts.accepted),
        "drafted_per_position": list(drafts.drafted),
        "accepted_per_position": list(drafts.accepted),
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
    if before and not before.endswith(b"\n"):
        before += b"\n"  # what follows a truncated line must not become a part of it
    write_whole(path, before + _lines(records))


def forget(keys: Collection[str], directory: Path) -> None:
    """Take the records of these cells out of the directory's results."""
    write_whole(
        directory / RESULTS,
        _lines(row for row in read(directory, lambda fault: None) if row["cell"] not in keys),
    )


def _lines(records: Iterable[Record]) -> bytes:
    lines = [json.dumps(finite(row), allow_nan=False, ensure_ascii=False) for row in records]
    return "".join(line + "\n" for line in lines).encode()


def read(directory: Path, on_fault: Callable[[str], None] | None = None) -> list[Record]:
    """Read the records of a results directory, in the order they were written.

    Args:
        directory: the directory.
        on_fault: called with a line about each record that is not whole or of another version of
            the schema; it is left out. None prints these on stderr.

    Raises:
        DataError: no results there.
    """
    path = directory / RESULTS
    if not path.is_file():
        raise DataError(f"no results at {path}")
    tell = on_fault or (lambda fault: print(f"specjax: warning: {fault}", file=sys.stderr))
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except ValueError:
            tell(f"{path}:{number}: no whole record; skipped")
            continue
        version = row.get("schema_version") if isinstance(row, dict) else None
        if version != SCHEMA_VERSION:
            tell(f"{path}:{number}: schema_version {version}, expected {SCHEMA_VERSION}; skipped")
            continue
        lacks = [name for name in _EVERY if name not in row]
        if lacks:
            tell(f"{path}:{number}: a record without {', '.join(lacks[:3])}; skipped")
            continue
        rows.append(row)
    return rows
