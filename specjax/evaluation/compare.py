"""Two runs side by side: what differs, and which differences exceed the noise.

Runs are paired by what tells the records of each apart from the others of its own directory, so
that what was changed between them (a head's weights, a setting) does not keep them from meeting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from specjax.evaluation import report
from specjax.evaluation.records import Record
from specjax.evaluation.sweep import DRAFTING_ENGINE

Verdict = Literal["better", "worse", "within noise", "one repeat", "same", "differs"]
Range = tuple[float, float]
# Settings that a baseline does not depend on.
_OF_DRAFTS = (
    *("dtype", "head_source", "time_shares", "calibration", "ngram."),
    *(f"engine.{name}" for name in DRAFTING_ENGINE),
)


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure of one pair of records.

    Attributes:
        cell: what the records are of: head, drafts, and what else tells them apart.
        head: the algorithm.
        figure: which figure.
        before: it and its range, None where there is none.
        after: the same of the other run.
        verdict: what the difference is worth.
    """

    cell: str
    head: str
    figure: str
    before: tuple[float, Range | None]
    after: tuple[float, Range | None]
    verdict: Verdict

    @property
    def relative(self) -> float | None:
        """The change as a share of what was before."""
        return self.after[0] / self.before[0] - 1 if self.before[0] else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What became of a run.

    Attributes:
        before: name of the first run.
        after: name of the other.
        changes: of the records that both have.
        alone: records that only one has, in words.
        warnings: why figures of the two may not be compared.
    """

    before: str
    after: str
    changes: list[Change]
    alone: list[str]
    warnings: list[str]


def compare(
    before: Sequence[Record], after: Sequence[Record], names: tuple[str, str] = ("before", "after")
) -> Comparison:
    """Compare the records of two results directories."""
    old, new = [row for row in before if not row["error"]], [r for r in after if not r["error"]]
    headers = {key: name for rows in (old, new) for name, key in report.telling(rows).items()}
    pairs_old, pairs_new = ({_identity(r, headers): r for r in rows} for rows in (old, new))
    changes = [
        change
        for key, row in pairs_old.items()
        if key in pairs_new
        for change in _changes(", ".join(key), row, pairs_new[key])
    ]
    alone = [
        f"only in {name}: {', '.join(key)}"
        for name, own, other in ((names[0], pairs_old, pairs_new), (names[1], pairs_new, pairs_old))
        for key in own
        if key not in other
    ]
    return Comparison(*names, changes, alone, _warnings(old, new))


def _identity(row: Record, headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return head, drafts and what else tells a record apart; `headers` names those settings."""
    flat, count = report.settings(row), row["num_speculative_tokens"]
    if row["head"] == "none":
        kept = {key: name for key, name in headers.items() if not key.startswith(_OF_DRAFTS)}
        return ("none", *(f"{name} {flat.get(key)}" for key, name in kept.items()))
    told = (f"{name} {flat.get(key)}" for key, name in headers.items())
    return (row["head"], f"{count} draft{'s' if count != 1 else ''}", *told)


def _changes(cell: str, old: Record, new: Record) -> list[Change]:
    plans: list[tuple[str, str, Callable[[Record], Range | None], Callable[..., Verdict]]] = [
        ("tokens/s", "output_tokens_per_second", _repeats, _apart),
        ("speedup", "speedup", lambda row: (row["speedup_low"], row["speedup_high"]), _apart),
        (
            "acceptance length",
            "mean_acceptance_length",
            lambda row: row["mean_acceptance_length_interval"],
            _beyond,
        ),
        (
            "acceptance rate",
            "acceptance_rate",
            lambda row: row["acceptance_rate_interval"],
            _beyond,
        ),
    ]
    found = []
    for figure, key, spread, judge in plans:
        values = old[key], new[key]
        if None in values or (figure == "speedup" and old["head"] == "none"):
            continue
        ranges = spread(old), spread(new)
        enough = judge is _beyond or min(old["repeats"], new["repeats"]) > 1
        verdict = judge(values, ranges) if enough else "one repeat"
        sides = tuple(zip(values, ranges, strict=True))
        found.append(Change(cell, old["head"], figure, sides[0], sides[1], verdict))
    shares = [row["identical"] for row in (old, new)]
    if None not in shares and shares != [old["prompts"], new["prompts"]]:
        was, now = (row["identical"] / row["prompts"] for row in (old, new))
        verdict = "same" if was == now else "differs"
        both = (was, None), (now, None)
        found.append(Change(cell, old["head"], "identical texts", *both, verdict))
    return found


def _repeats(row: Record) -> Range | None:
    known = [value for value in row["output_tokens_per_second_repeats"] if value is not None]
    return (min(known), max(known)) if known else None


def _apart(values: Sequence[float], ranges: Sequence[Range | None]) -> Verdict:
    """Whether no repeat of one run reaches any of the other."""
    old, new = ranges
    if old is None or new is None:
        return "one repeat"
    if new[0] > old[1]:
        return "better"
    return "worse" if new[1] < old[0] else "within noise"


def _beyond(values: Sequence[float], ranges: Sequence[Range | None]) -> Verdict:
    """Whether the difference exceeds the interval of a difference of two independent figures."""
    old, new = ranges
    if values[0] == values[1]:
        return "same"
    if old is None or new is None:
        return "differs"
    up = values[1] > values[0]
    lower, upper = ((values[0], old), (values[1], new))[:: 1 if up else -1]
    reach = math.hypot(lower[1][1] - lower[0], upper[0] - upper[1][0])  # towards each other
    if upper[0] - lower[0] <= reach:
        return "within noise"
    return "better" if up else "worse"


def _warnings(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    plans: list[tuple[str, Callable[[Record], Any]]] = [
        (
            "The prompts are not the same, and acceptance differs with them.",
            lambda r: r["prompts_sha256"],
        ),
        (
            "The prompts were rendered otherwise (chat template or thinking).",
            lambda r: (str(r["chat_template"]), r["enable_thinking"]),
        ),
        ("The targets are not the same.", lambda r: r["fingerprints"]["target"]),
        (
            "The machines are not the same: compare speedups rather than tokens/s.",
            lambda r: [r["machine"].get(key) for key in ("device_kind", "processor", "devices")],
        ),
    ]
    return [
        said for said, of in plans if {str(of(row)) for row in old} != {str(of(row)) for row in new}
    ]


def explained(comparison: Comparison) -> str:
    """Return how the verdicts of a comparison are meant."""
    return (
        "Better and worse: for speeds, no repeat of one run reaches any of the other; for "
        "acceptance, the difference exceeds its 95 % interval (bootstrap over prompts). With 3 "
        "repeats each, speeds of equal runs part like that once in ten comparisons."
    )


def table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return header and lines, one per figure."""
    header = ["run", "figure", "before", "after", "change", "verdict"]
    lines, last = [], ""
    for change in comparison.changes:
        relative = change.relative
        lines.append(
            [
                change.cell if change.cell != last else "",
                change.figure,
                _with_range(change.before),
                _with_range(change.after),
                "" if relative is None else f"{100 * relative:+.1f} %",
                change.verdict,
            ]
        )
        last = change.cell
    return header, lines


def _with_range(side: tuple[float, Range | None]) -> str:
    value, spread = side
    form = ",.0f" if value >= 100 else ".1f" if value >= 20 else ".2f"
    if spread is None:
        return format(value, form)
    return f"{value:{form}} ({spread[0]:{form}}-{spread[1]:{form}})"


def show(comparison: Comparison, console: Console) -> None:
    """Print a comparison, 100 columns wide at most."""
    width = min(console.width, report.WIDTH)
    heading = f"before: {comparison.before}\nafter:  {comparison.after}"
    console.print(heading, width=width, highlight=False, markup=False)
    if comparison.changes:
        grid = Table(box=None, pad_edge=False, collapse_padding=True)
        header, lines = table(comparison)
        for i, name in enumerate(header):
            grid.add_column(
                name,
                justify="right" if 2 <= i <= 4 else "left",
                overflow="fold",
                no_wrap=i > 0,
            )
        colours = {"better": "green", "worse": "red"}
        for line in lines:
            grid.add_row(*line[:-1], line[-1], style=colours.get(line[-1], ""))
        console.print(grid, width=width)
        console.print(explained(comparison), width=width, highlight=False)
    else:
        console.print("The two have no run in common.")
    for said in (*comparison.warnings, *comparison.alone):
        console.print(said, width=width, highlight=False, markup=False)
