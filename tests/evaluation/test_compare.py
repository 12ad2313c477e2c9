"""Comparisons: runs meet whatever was changed, and only what exceeds the noise is a change."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from specjax.evaluation import compare
from specjax.evaluation.html import compare_page
from specjax.evaluation.records import Record
from tests.evaluation.test_html import Outline


def changed(row: Record, **figures: Any) -> Record:
    return copy.deepcopy(row) | figures


def verdicts(old: Record, new: Record) -> dict[str, str]:
    found = compare.compare([old], [new]).changes
    return {change.figure: change.verdict for change in found}


def test_speeds_differ_where_no_repeats_meet(rows: list[Record]) -> None:
    def speed(values: list[float]) -> Record:
        ends = {"speedup_low": min(values), "speedup_high": max(values)}
        return changed(
            rows[1],
            repeats=len(values),
            output_tokens_per_second=sorted(values)[len(values) // 2],
            output_tokens_per_second_repeats=values,
            speedup=sorted(values)[len(values) // 2],
            **ends,
        )

    old = speed([1.0, 1.1, 1.2])
    for values, verdict in (
        ([1.3, 1.4, 1.5], "better"),
        ([1.15, 1.4, 1.5], "within noise"),
        ([0.7, 0.8, 0.9], "worse"),
        ([3.0], "one repeat"),
    ):
        found = verdicts(old, speed(values))
        assert found["tokens/s"] == found["speedup"] == verdict


@pytest.mark.parametrize(
    ("after", "interval", "verdict"),
    [
        (2.0, (1.7, 2.3), "same"),
        (2.4, (2.1, 2.7), "within noise"),  # 0.4 < sqrt(0.3^2 + 0.3^2)
        (2.5, (2.2, 2.8), "better"),  # though the intervals overlap
        (1.5, (1.2, 1.8), "worse"),
        (2.9, None, "differs"),
    ],
)
def test_acceptance_differs_beyond_its_interval(
    rows: list[Record], after: float, interval: Any, verdict: str
) -> None:
    key = "mean_acceptance_length"
    old = changed(rows[1], **{key: 2.0, f"{key}_interval": [1.7, 2.3]})
    new = changed(rows[1], **{key: after, f"{key}_interval": interval})
    assert verdicts(old, new)["acceptance length"] == verdict


def test_what_was_changed_keeps_no_runs_apart(rows: list[Record]) -> None:
    """Another head directory and temperature meet; what one run sweeps does not."""
    new = [changed(row, head_source="runs/b", temperature=0.7, cell="x") for row in rows]
    found = compare.compare(rows, new)
    assert {change.cell for change in found.changes} == {"none", "eagle3, 3 drafts"}
    assert not found.alone
    wide = changed(rows[1], concurrency=9)
    found = compare.compare([*rows, wide], rows, ("a", "b"))
    assert [said for said in found.alone if "batch 9" in said and said.startswith("only in a")]


def test_what_may_not_be_compared_is_told(rows: list[Record]) -> None:
    """F65: another rendering of the prompts moves acceptance."""
    assert compare.compare(rows, rows).warnings == []
    new = [changed(row, prompts_sha256="x", chat_template=False) for row in rows]
    said = " ".join(compare.compare(rows, new).warnings)
    assert "prompts are not the same" in said and "rendered otherwise" in said


def test_terminal_and_page(rows: list[Record]) -> None:
    long = [changed(row, output_tokens_per_second=123456.7) for row in rows]
    found = compare.compare(rows, long, ("runs/a", "runs/b"))
    out = io.StringIO()
    compare.show(found, Console(file=out, width=200))
    assert max(map(len, out.getvalue().splitlines())) <= 100
    assert "acceptance length" in out.getvalue()
    page = compare_page.render([found])
    assert Outline(page).loads == ["data:,"]
    assert "runs/a → runs/b" in page
    none = compare.compare(rows[:1], [changed(rows[1], error="x")])
    assert "no run in common" in compare_page.render([none])
