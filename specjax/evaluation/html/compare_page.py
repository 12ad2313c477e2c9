"""compare.html: runs side by side, before and after a change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specjax.evaluation import compare
from specjax.evaluation.compare import Change, Comparison, Range
from specjax.evaluation.html.palette import title
from specjax.evaluation.html.render import render as fill

PAGE = "compare.html"


def render(comparisons: Sequence[Comparison]) -> str:
    """Return the page of comparisons with one and the same first run."""
    return fill(
        "compare.html.j2",
        title="Before and after",
        comparisons=[_shown(each) for each in comparisons],
    )


def _shown(comparison: Comparison) -> dict[str, Any]:
    verdicts = [change.verdict for change in comparison.changes]
    header, lines = compare.table(comparison)
    figures: dict[str, list[dict[str, Any]]] = {}
    for figure in dict.fromkeys(change.figure for change in comparison.changes):
        found = [change for change in comparison.changes if change.figure == figure]
        sides = [side for change in found for side in (change.before, change.after)]
        top = max(max(value, *(spread or (0,))) for value, spread in sides)
        figures[figure] = [_bars(change, top or 1) for change in found]
    return {
        "before": comparison.before,
        "after": comparison.after,
        "counts": {word: verdicts.count(word) for word in ("better", "worse", "within noise")},
        "figures": figures,
        "header": header,
        "lines": lines,
        "explained": compare.explained(comparison),
        "said": (*comparison.warnings, *comparison.alone),
    }


def _bars(change: Change, top: float) -> dict[str, Any]:
    head, _, rest = change.cell.partition(", ")
    relative = change.relative
    return {
        "name": ", ".join(part for part in (title(head), rest) if part),
        "head": change.head,
        "verdict": change.verdict,
        "relative": "" if relative is None else f"{100 * relative:+.1f} %",
        "bars": [_bar(side, top) for side in (change.before, change.after)],
    }


def _bar(side: tuple[float, Range | None], top: float) -> dict[str, Any]:
    value, spread = side
    low, high = spread or (value, value)
    text = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    places = {"value": value, "low": low, "width": high - low}
    return {"text": text, **{name: round(100 * place / top, 2) for name, place in places.items()}}
