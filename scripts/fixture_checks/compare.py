"""The verdict on each tensor, and the table of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from scripts.fixture_checks.fixture import Fixture
    from scripts.fixture_checks.outcome import Outcome

VALUE_TOLERANCE = 1e-4
"""Of max(1, largest expected magnitude)."""
GRADIENT_TOLERANCE = 2e-3
"""Of the largest expected magnitude."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of the table.

    Attributes:
        tensor: its name.
        difference: largest absolute difference, None where nothing was compared.
        verdict: in words.
        failed: computed and wrong.
        absent: not computed.
    """

    tensor: str
    difference: float | None
    verdict: str
    failed: bool = False
    absent: bool = False


def compare(fixture: Fixture, outcome: Outcome) -> list[Line]:
    """Judge every output that the fixture names (if it names none, all computed), in its order."""
    names = fixture.outputs or outcome.tensors
    return [_line(name, fixture, outcome) for name in names]


def _line(name: str, fixture: Fixture, outcome: Outcome) -> Line:
    if name not in outcome.tensors:
        why = outcome.why_not.get(name, outcome.otherwise)
        return Line(name, None, f"not computed: {why}", absent=True)
    if name not in fixture.expected:
        return Line(name, None, "written, nothing to compare with")
    return judge(name, outcome.tensors[name], fixture.expected[name], outcome.ties.get(name))


def judge(name: str, got: np.ndarray, want: np.ndarray, ties: np.ndarray | None = None) -> Line:
    """Compare one tensor: integers and booleans exactly, floats within the tolerance."""
    if got.shape != want.shape:
        return Line(name, None, f"FAILS: shape {got.shape} for {want.shape}", failed=True)
    if want.dtype.kind in "iub":
        wrong = int(np.count_nonzero(got != want))
        verdict = "agrees exactly" if not wrong else f"FAILS: {wrong} of {want.size} differ"
        return Line(name, float(wrong > 0), verdict, failed=wrong > 0)
    gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
    if ties is not None:
        gap = np.where(ties, 0.0, gap)
    worst = float(gap.max(initial=0.0))
    largest = float(np.abs(want).max(initial=0.0))
    gradient = ".grad." in f".{name}."
    allowed = (
        GRADIENT_TOLERANCE * (largest or 1.0) if gradient else VALUE_TOLERANCE * max(1.0, largest)
    )
    good = worst <= allowed  # False for NaN
    return Line(name, worst, "agrees" if good else f"FAILS: at most {allowed:.1e}", failed=not good)


def print_table(name: str, lines: list[Line], console: Console) -> None:
    """Print the table and a summary line."""
    if not console.is_terminal:
        console = Console(file=console.file, width=140)
    table = Table(title=name, title_justify="left")
    table.add_column("tensor", no_wrap=True)
    table.add_column("max abs diff", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for line in lines:
        difference = "-" if line.difference is None else f"{line.difference:.1e}"
        style = "red" if line.failed else "yellow" if line.absent else ""
        table.add_row(line.tensor, difference, line.verdict, style=style)
    console.print(table)
    absent, failed = sum(x.absent for x in lines), sum(x.failed for x in lines)
    compared = sum(x.difference is not None or x.failed for x in lines)
    console.print(
        f"{name}: {len(lines) - absent} computed, {compared} compared, {failed} differ,"
        f" {absent} not computed"
    )
