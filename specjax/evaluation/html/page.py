"""report.html: everything that a results directory has to say, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.evaluation import report
from specjax.evaluation.html import figures, series, trace_page
from specjax.evaluation.html.palette import TIMES
from specjax.evaluation.html.render import render
from specjax.evaluation.records import Record, finite, write_whole

PAGE = "report.html"
FIGURES = "figures"  # the folder of the same figures as files


def write(directory: Path, rows: Sequence[Record]) -> list[str]:
    """Write report.html, its figures as files, and trace.html where texts were traced.

    Returns:
        The paths of the figures as PNG, below the directory.

    Raises:
        DataError: something cannot be written.
    """
    drawn = figures.draw_all(rows)
    for each in drawn:
        write_whole(directory / FIGURES / f"{each.name}.svg", each.svg)
        write_whole(directory / FIGURES / f"{each.name}.png", each.png)
    traced = trace_page.pages(rows)
    if traced:
        write_whole(directory / trace_page.PAGE, trace_page.render(traced))
    write_whole(directory / PAGE, page(rows, drawn, bool(traced)))
    return [f"{FIGURES}/{each.name}.png" for each in drawn]


def page(rows: Sequence[Record], drawn: Sequence[figures.Figure], traced: bool = False) -> str:
    """Return the page.

    Args:
        rows: at least one record.
        drawn: what `figures.draw_all` made of them.
        traced: whether there is a trace to point to.
    """
    shared, varying = _settings(rows)
    return render(
        "report.html.j2",
        title="Evaluation of " + ", ".join(dict.fromkeys(row["target"] for row in rows)),
        headlines=[_headline(each, row) for each, row in series.best(rows)],
        failures=[row for row in rows if row["error"]],
        notes=list(dict.fromkeys(note for row in rows for note in row["notes"])),
        remarks=[said for said in report.remarks(rows) if not said.startswith("FAILED")],
        figures=drawn,
        tables=report.tables(rows),
        traced=trace_page.PAGE if traced else None,
        machine={k: v for k, v in rows[-1]["machine"].items() if v not in ("", None)},
        runs=sorted({row["run"] for row in rows}),
        shared=shared,
        varying=varying,
    )


def _headline(each: series.Series, row: Record) -> Mapping[str, Any]:
    speedup = row["speedup"]
    interval = row["mean_acceptance_length_interval"]
    base = row["baseline_output_tokens_per_second"][row["baseline_dtype"]]
    repeats = row["repeats"]
    tiles = [
        (
            "speedup",
            "n/a" if speedup is None else f"{speedup:.2f}{TIMES}",
            f"{report.number(row['speedup_low'])} to {report.number(row['speedup_high'])} over "
            f"{repeats} repeat{'s' if repeats != 1 else ''}",
        ),
        (
            "mean acceptance length",
            report.number(row["mean_acceptance_length"]),
            f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}" if interval else "",
        ),
        (
            "output tokens per second",
            report.number(row["output_tokens_per_second"], ",.1f"),
            f"baseline {report.number(base, ',.1f')} in {row['baseline_dtype']}",
        ),
    ]
    if row["identical"] is not None:
        ties = f"{row['near_ties']} of {row['differing']} differences are near-ties"
        told = ties if row["differing"] else "of the baseline's texts, token for token"
        tiles.append(("identical texts", f"{row['identical']}/{row['prompts']}", told))
    return {
        "target": row["target"],
        "pays": speedup is not None and speedup > 1,
        "sure": row["speedup_low"] is not None and row["speedup_low"] > 1,
        "head": each.head,
        "name": each.name,
        "drafts": row["num_speculative_tokens"],
        "batch": row["concurrency"],
        "tiles": tiles,
    }


def _settings(rows: Sequence[Record]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return (settings that all runs have in common, values of those that differ)."""
    drafting = [row for row in rows if row["head"] != "none"]
    each = [finite(report.settings(row)) for row in drafting or rows[:1]]
    values = {
        name: list({str(flat.get(name)): flat.get(name) for flat in each}.values())
        for flat in each
        for name in flat
    }
    shared = {name: found[0] for name, found in values.items() if len(found) == 1}
    return shared, {name: found for name, found in values.items() if len(found) > 1}
