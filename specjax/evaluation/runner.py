"""The evaluation itself: plan, load, run in alternation, compare, record, report.

A sweep is a list of evaluations; one evaluation is a sweep of one cell. Cells that share a baseline
are measured together in windows, and their records written when a window is done.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
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

from specjax.core import hosts
from specjax.core.errors import ConfigError, DataError
from specjax.core.sharding import Layout
from specjax.evaluation import machine, metrics, records, report, shares
from specjax.evaluation.calibrate import record_rounds, reliability
from specjax.evaluation.config import EvalConfig, SweepConfig, listed
from specjax.evaluation.html import page
from specjax.evaluation.lossless import differences, tokens_compared
from specjax.evaluation.measure import (
    Measured,
    baseline,
    make_engine,
    run_alternating,
    speculative,
)
from specjax.evaluation.records import Context, Findings, Losslessness, Record
from specjax.evaluation.subject import Opened, Subject, open_target, with_head, with_requests
from specjax.evaluation.sweep import Cell, held, plan, windows
from specjax.evaluation.trace import trace

_CALIBRATED = 64  # requests whose rounds are enough to judge confidences by

Tell = Callable[[str], None]


def run(config: EvalConfig, operative: str = "") -> list[Record]:
    """Evaluate what a configuration names; write and print the results.

    Args:
        config: what to measure.
        operative: the configuration as text that replays it, saved beside the results.

    Returns:
        The records: of the baseline, and of the head or heads.

    Raises:
        SpecJaxError: one line, before anything is written, for anything wrong in what was given.
    """
    return run_sweep([config], SweepConfig(), operative)


def run_sweep(
    configs: Sequence[EvalConfig], sweep: SweepConfig, operative: str = ""
) -> list[Record]:
    """Evaluate several configurations; write each record when it is done, and print the results.

    Cells whose records are in the directory already are not run again. Where there are several
    cells, one that fails is recorded with its error and the others go on.

    Args:
        configs: what to measure; all write to the directory of the first.
        sweep: how to go about it; the cells themselves are in `configs`.
        operative: see `run`.

    Returns:
        The records of these cells and their baselines, earlier ones included.

    Raises:
        SpecJaxError: one line, before anything is written: see `run`; for several cells, what can
            be known of them beforehand.
    """
    lead = hosts.is_lead()  # of several processes the one that writes
    console = Console(quiet=not lead)
    if not console.is_terminal:
        console.width = report.WIDTH
    directory = writable(configs[0].out)
    for config in configs:
        if (layout := Layout.served(config.engine.mesh)) is not None:
            layout.check_rows(config.concurrency, "Eval.concurrency")
    said: set[str] = set()
    cells = plan(each for config in configs for each in listed(config))
    if hosts.of_lead(keys := " ".join(cell.key for cell in cells)) != keys:
        raise ConfigError(
            "this process would evaluate something else than process 0: give all"
            " hosts the same settings and files"
        )
    earlier = _recorded(directory)
    done = {row["cell"] for row in earlier}
    if sweep.retry:
        failed = {row["cell"] for row in earlier if row["error"]} & {cell.key for cell in cells}
        if failed and lead:
            records.forget(failed, directory)
        done -= failed
    todo = [cell for cell in cells if cell.key not in done]
    if len(todo) < len(cells):
        console.print(f"{len(cells) - len(todo)} of {len(cells)} cells are done already.")
        if configs[0].trace and not todo:
            console.print("Nothing is left to trace: texts are traced when a cell is measured.")
    # One process of several that went on would wait for the others for ever.
    keep_going = len(cells) > 1 and not hosts.are_several()
    load = _Loader(console)
    for window in windows(todo, sweep.together):
        try:
            opened, base = load(window[0])
            for row in measure(window, opened, base, done, console, keep_going):
                done.add(row["cell"])
                if not lead:
                    continue
                records.append([row], directory)
                if operative:  # not before there is a record that it belongs to
                    records.write_whole(directory / "config.gin", operative)
                for note in row["notes"]:
                    if note not in said:
                        console.print(note, highlight=False)
                    said.add(note)
        # Whatever it is, out of memory included: it is what became of these cells.
        except Exception as error:
            if not keep_going:
                raise
            left = [cell for cell in window if cell.key not in done]
            name = load.name or window[0].config.target
            rows = [records.failure(cell, error, name, _context()) for cell in left]
            records.append(rows, directory)
    every = _recorded(directory, lambda fault: None)  # told above
    rows = _of(cells, every)
    if lead:
        report.write(directory, every, page.write(directory, every))
        report.show(rows, console)
        console.print(f"Results: {directory}", highlight=False)
    return rows


def measure(
    window: Sequence[Cell],
    opened: Opened,
    base: Subject,
    done: set[str] | frozenset[str] = frozenset(),
    console: Console | None = None,
    keep_going: bool = False,
) -> Iterator[Record]:
    """Measure cells that share a baseline; nothing is written.

    Args:
        window: the cells.
        opened: their target.
        base: their requests.
        done: keys of records that there are already; of these only the baseline's matters.
        console: where notes and the progress bar go; None shows none.
        keep_going: yield the records of failed cells instead of raising.

    Yields:
        The baseline's record unless it is done, then one per cell.
    """
    config = window[0].config
    context = _context()
    subjects: dict[str, Subject] = {}
    failed: list[Record] = []
    for cell in window:
        try:
            if not cell.is_baseline:
                subjects[cell.key] = _with_head(base, opened, cell, window, subjects)
        except Exception as error:
            if not keep_going:
                raise
            failed.append(records.failure(cell, error, opened.name, context))
    drafting = [cell for cell in window if cell.key in subjects]
    variants = [baseline(config, dtype) for dtype in config.baseline_dtypes]
    split = len(variants)
    variants += [speculative(cell.config, subjects[cell.key]) for cell in drafting]
    with _progress(console) as progress:
        total = len(variants) * config.repeats * len(base.requests)
        bar = progress.add_task("warm-up", total=total)

        def advance(label: str) -> None:
            progress.update(bar, description=label, advance=0 if label == "warm-up" else 1)

        measured = run_alternating(base, variants, config.repeats, advance, keep_going)
        baselines = {m.variant.dtype: m for m in measured[:split] if isinstance(m, Measured)}
        if window[0].baseline not in done:
            own = next((cell for cell in window if cell.is_baseline), None)
            cell = own or _baseline_cell(window[0])
            best = baselines[records.fastest(baselines)]
            found = Findings(_compare(base, best, baselines) if config.greedy else None)
            yield records.record(cell, base, best, baselines, found, context)
        yield from failed
        for cell, each in zip(drafting, measured[split:], strict=True):
            subject = subjects[cell.key]
            try:
                if isinstance(each, Exception):
                    raise each

                def tell(what: str, label: str = each.variant.label) -> None:
                    progress.update(bar, description=f"{label}: {what}")

                found = look_into(cell.config, subject, each, baselines, tell)
                row = records.record(cell, subject, each, baselines, found, context)
            except Exception as error:
                if not keep_going:
                    raise
                row = records.failure(cell, error, opened.name, context)
            yield row


def look_into(
    config: EvalConfig,
    subject: Subject,
    measured: Measured,
    baselines: dict[str, Measured],
    tell: Tell,
) -> Findings:
    """Compare the texts of a speculative run, time its stages, judge its confidences, trace it.

    Args:
        config: of the run.
        subject: what was measured.
        measured: the run.
        baselines: by dtype.
        tell: called with what goes on.
    """
    variant = measured.variant
    lossless = stages = calibration = traced = None
    if config.greedy:
        tell("texts")
        lossless = _compare(subject, measured, baselines)
    if config.time_shares:
        tell("stages")
        stages = shares.time_stages(make_engine(subject, variant), subject.requests)
    if config.calibration and getattr(variant.head, "has_confidence", False):
        tell("confidences")
        settings = dataclasses.replace(variant.settings, verification="fixed")
        engine = make_engine(subject, dataclasses.replace(variant, settings=settings))
        calibration = reliability(record_rounds(engine, subject.requests[:_CALIBRATED]))
    if config.trace:
        tell("trace")
        count = sum(group < config.trace for group in subject.groups)
        traced = trace(
            make_engine(subject, variant),
            subject.requests[:count],
            measured.passes[0].results[:count],
            subject.decode,
        )
    return Findings(lossless, stages, calibration, traced)


def writable(out: str) -> Path:
    """Return the directory of the results, which may yet have to be made.

    Raises:
        DataError: it cannot be made or written.
    """
    directory = Path(out or f"runs/{_now():%Y-%m-%d_%H-%M-%S}").expanduser()
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        raise DataError(f"{directory} cannot be made: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DataError(f"{directory} is not writable")
    return directory


def _recorded(directory: Path, on_fault: Tell | None = None) -> list[Record]:
    """Return the records that are there already, as process 0 finds them."""
    there = hosts.is_lead() and (directory / records.RESULTS).exists()
    rows = records.read(directory, on_fault) if there else []
    return json.loads(hosts.of_lead(json.dumps(rows)))


def _of(cells: Sequence[Cell], rows: Sequence[Record]) -> list[Record]:
    """Return the records of cells, those of one baseline behind it."""
    by_key = {row["cell"]: row for row in rows}
    groups = [(group[0].baseline, *(c.key for c in group)) for group in windows(cells, len(cells))]
    keys = dict.fromkeys(key for group in groups for key in group)
    return [by_key[key] for key in keys if key in by_key]


def _context() -> Context:
    return Context(_now().isoformat(timespec="seconds"), machine.describe())


def _baseline_cell(cell: Cell) -> Cell:
    """Return the baseline of a cell as a cell of its own."""
    config = dataclasses.replace(cell.config, head="none") if cell.config.target else cell.config
    prints = {**cell.fingerprints, "head": "none"}
    return Cell(config, prints, cell.baseline, cell.baseline)


class _Loader:
    """Keeps the last target, and its last requests, for as long as windows share them."""

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self.opened: tuple[str, Opened] | None = None
        self.base: tuple[str, Subject] | None = None

    @property
    def name(self) -> str:
        """What records call the target; "" where none is loaded."""
        return self.opened[1].name if self.opened else ""

    def __call__(self, cell: Cell) -> tuple[Opened, Subject]:
        names = held(cell)
        if self.opened is None or self.opened[0] != names:
            self.opened = self.base = None  # its memory goes before the next target comes
            gc.collect()
            self.opened = names, open_target(cell.config)
        opened = self.opened[1]
        if self.base is None or self.base[0] != cell.baseline:
            with _progress(self.console) as progress:
                bar = progress.add_task("answers to earlier turns", total=None, visible=False)

                def advance(_: object) -> None:
                    progress.update(bar, advance=1, visible=True)

                self.base = cell.baseline, with_requests(opened, cell.config, advance)
        return opened, self.base[1]


def _with_head(
    base: Subject, opened: Opened, cell: Cell, window: Sequence[Cell], loaded: dict[str, Subject]
) -> Subject:
    """Load a cell's head, or take it from a cell of the window that has the same."""

    def names(other: Cell) -> tuple[object, ...]:
        config = other.config
        return other.fingerprints["head"], config.head, config.dtype, config.ngram

    for other in window:
        if other.key in loaded and names(other) == names(cell):
            return loaded[other.key]
    return with_head(base, opened, cell.config)


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
        identical=metrics.identical(runs, reference, subject.groups),
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
