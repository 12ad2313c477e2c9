"""The evaluation itself: load, run in alternation, compare texts, time the stages, report."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specjax.core.errors import DataError
from specjax.evaluation import machine, metrics, records, report, shares
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.lossless import differences, tokens_compared
from specjax.evaluation.measure import (
    Measured,
    Variant,
    baseline,
    engine_settings,
    make_engine,
    run_alternating,
)
from specjax.evaluation.records import Losslessness, Record
from specjax.evaluation.subject import Subject, load


def run(config: EvalConfig, operative: str = "") -> list[Record]:
    """Evaluate what a configuration names; write and print the results.

    Args:
        config: what to measure.
        operative: the configuration as text that replays it, saved beside the results.

    Returns:
        The records, the baseline's first.

    Raises:
        SpecJaxError: one line, before anything has run, for anything wrong in what was given.
    """
    return run_token_counts(config, (config.num_speculative_tokens,), operative)


def run_token_counts(
    config: EvalConfig, token_counts: Sequence[int], operative: str = ""
) -> list[Record]:
    """Evaluate one head at several numbers of speculative tokens against a shared baseline.

    Args:
        config: what to measure; its own num_speculative_tokens is not used.
        token_counts: drafts per round, one speculative run for each.
        operative: see `run`.
    """
    console = Console()
    directory = prepare_directory(config.out)
    subject = load(config)
    for note in subject.notes:
        console.print(note, highlight=False)
    rows = evaluate(config, subject, token_counts, console)
    records.append(rows, directory)
    if operative:
        records.write_whole(directory / "config.gin", operative)
    report.write(directory)
    report.show(rows, console)
    console.print(f"Results: {directory}", highlight=False)
    return rows


def evaluate(
    config: EvalConfig,
    subject: Subject,
    token_counts: Sequence[int],
    console: Console | None = None,
) -> list[Record]:
    """Measure a loaded subject; nothing is written.

    Args:
        config: how to measure.
        subject: what to measure.
        token_counts: drafts per round of each speculative run; unused with the null head.
        console: where the progress bar goes; None shows none.

    Returns:
        The baseline's record, then one per token count.
    """
    variants = [baseline(dtype) for dtype in config.baseline_dtypes]
    if subject.head.name != "none":
        variants += [
            Variant(config.dtype, subject.head, subject.head_params, count)
            for count in token_counts
        ]
    settings = engine_settings(config)
    with _progress(console) as progress:
        total = len(variants) * config.repeats * len(subject.requests)
        bar = progress.add_task("warm-up", total=total)

        def advance(label: str) -> None:
            progress.update(bar, description=label, advance=0 if label == "warm-up" else 1)

        measured = run_alternating(subject, variants, settings, config.repeats, advance)
        split = len(config.baseline_dtypes)
        baselines = {m.variant.dtype: m for m in measured[:split]}
        context = {"run": _now().isoformat(timespec="seconds"), "machine": machine.describe()}
        rows = []
        for each in (baselines[records.fastest(baselines)], *measured[split:]):
            progress.update(bar, description=f"{each.variant.label}: texts")
            lossless = _compare(subject, each, baselines) if config.greedy else None
            stages = None
            if config.time_shares and not each.variant.is_baseline:
                progress.update(bar, description=f"{each.variant.label}: stages")
                engine = make_engine(subject, each.variant, settings)
                stages = shares.time_stages(engine, subject.requests)
            rows.append(records.record(config, subject, each, baselines, lossless, stages, context))
    return rows


def prepare_directory(out: str) -> Path:
    """Make the directory of the results and check that it can be written.

    Raises:
        DataError: it cannot.
    """
    directory = Path(out or f"runs/{_now():%Y-%m-%d_%H-%M-%S}").expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{directory} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK):
        raise DataError(f"{directory} is not writable")
    return directory


def _compare(subject: Subject, measured: Measured, baselines: dict[str, Measured]) -> Losslessness:
    """Compare a greedy run, all repeats of it, with the baseline of its dtype."""
    dtype = measured.variant.dtype
    reference = baselines[dtype].passes[0].results
    runs = [each.results for each in measured.passes]
    # For every request the first repeat whose text differs, if one does.
    shown = [
        next((r for r in repeats if r.token_ids != base.token_ids), repeats[0])
        for base, *repeats in zip(reference, *runs, strict=True)
    ]
    params = subject.params[dtype]
    return Losslessness(
        identical=metrics.identical(runs, reference),
        differences=differences(subject.target, params, dtype, subject.requests, reference, shown),
        tokens_compared=tokens_compared(reference, shown),
    )


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
        transient=True,
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
