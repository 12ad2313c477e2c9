"""Which records belong together in a figure: those of one head that differ in width and batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from specjax.evaluation import report
from specjax.evaluation.html.palette import title
from specjax.evaluation.records import Record

_STYLES = ("-", "--", ":", "-.")


@dataclasses.dataclass(frozen=True)
class Series:
    """The runs of one head, all settings but width and concurrency equal.

    Attributes:
        name: what figures call it.
        head: its algorithm, which gives the colour.
        style: of its lines; differs between series of one algorithm.
        rows: its records.
    """

    name: str
    head: str
    style: str
    rows: tuple[Record, ...]

    @property
    def best(self) -> Record:
        """The run with the highest speedup."""
        return max(self.rows, key=_speedup)

    @property
    def widest(self) -> Record:
        """Of the runs with the most drafts per round the one with the smallest batch."""
        return max(self.rows, key=lambda r: (r["num_speculative_tokens"], -r["concurrency"]))

    def values(self, key: str) -> list[int]:
        """Return the different values of a setting, sorted."""
        return sorted({row[key] for row in self.rows})


def of(rows: Iterable[Record]) -> list[Series]:
    """Return the series of measured runs that draft, best first."""
    drafting = [row for row in rows if not row["error"] and row["head"] != "none"]
    groups: dict[tuple[str, ...], list[Record]] = {}
    for row in drafting:
        apart = report.apart(row, drafting)
        apart.pop("batch", None)
        told = [f"{name} {value}" for name, value in apart.items() if value]
        groups.setdefault((row["head"], *told), []).append(row)
    seen: dict[str, int] = {}
    found = []
    for (head, *told), members in groups.items():
        style = _STYLES[seen.get(head, 0) % len(_STYLES)]
        seen[head] = seen.get(head, 0) + 1
        found.append(Series(", ".join((title(head), *told)), head, style, tuple(members)))
    return sorted(found, key=lambda each: -_speedup(each.best))


def best(rows: Sequence[Record]) -> list[tuple[Series, Record]]:
    """Return the fastest run of each target with its series, targets as they first appear."""
    found: dict[str, tuple[Series, Record]] = {}
    for each in of(rows):
        for row in each.rows:
            held = found.get(row["target"])
            if held is None or _speedup(row) > _speedup(held[1]):
                found[row["target"]] = each, row
    return list(found.values())


def _speedup(row: Record) -> float:
    return row["speedup"] or 0.0
