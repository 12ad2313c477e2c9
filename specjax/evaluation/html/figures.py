"""Figures of an evaluation, each as SVG for the page and as SVG and PNG files beside it.

They are drawn narrow, so that a telephone shows them legibly and a wide screen two in a row.
matplotlib is imported where a figure is drawn, and not before.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from specjax.evaluation.html.palette import COLOURS, TIMES, colour, themed
from specjax.evaluation.html.series import Series, of
from specjax.evaluation.records import Record

_WIDTH = 4.9  # inches
_INK, _MUTED, _LINE = (COLOURS[name][0] for name in ("ink", "muted", "line"))
_CELL_INK = "#111418"  # on the colours of a heat map, which are the same in the dark
_RULES: dict[Any, Any] = {
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.8,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0,
    "figure.facecolor": COLOURS["panel"][0],
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "specjax",
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A drawn figure.

    Attributes:
        name: of its files.
        title: what it shows.
        caption: how to read it.
        svg: as a file.
        png: as a file.
    """

    name: str
    title: str
    caption: str
    svg: str
    png: bytes

    @property
    def inline(self) -> str:
        """The SVG element for a page: its colours are variables, its ids are its own."""
        svg = self.svg[self.svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'\bid="', f'id="{self.name}-', svg)
        svg = re.sub(r'(url\(|href=")#', rf"\1#{self.name}-", svg)
        svg = re.sub(r"(font: [^;\"]*?px )[^;\"]*", r"\1system-ui, sans-serif", svg)
        svg = svg.replace("<svg ", f'<svg role="img" aria-label="{self.title}" ', 1)
        return themed(svg)


def draw_all(rows: Sequence[Record]) -> list[Figure]:
    """Draw every figure that the records have data for."""
    every = of(rows)
    drafted = _known(every, "acceptance_rate_per_position")
    followed = _known(every, "acceptance_rate_per_position_conditional")
    timed = [each for each in every if each.best["time_shares"]]
    wide = [each for each in every if len(each.values("num_speculative_tokens")) > 1]
    both = [each for each in wide if len(each.values("concurrency")) > 1]
    sure = [each for each in every if (each.best["calibration"] or {}).get("bins")]
    plans: list[tuple[Callable[..., None], list[Series], str, str, str]] = [
        (
            speedup,
            every,
            "speedup",
            "Speedup by head",
            "Each head at its best setting, against the fastest baseline; the bar's end is the "
            "median over repeats, the line its range.",
        ),
        (
            tokens,
            wide,
            "tokens",
            "Speedup against drafts per round",
            "num_speculative_tokens from left to right; bands are ranges over repeats.",
        ),
        (
            acceptance,
            drafted,
            "acceptance",
            "Acceptance by draft position",
            "Share of all rounds in which the draft at that position was accepted; bands are 95 % "
            "bootstrap intervals over prompts.",
        ),
        (
            conditional,
            followed,
            "acceptance_conditional",
            "Acceptance once the draft before stood",
            "Given that the position before was accepted: how good a head is where it gets to.",
        ),
        (
            heat,
            both,
            "heat_map",
            "Speedup by drafts per round and batch",
            "Blue is faster than not speculating, red slower; the frame marks the best.",
        ),
        (
            time_shares,
            timed,
            "time_shares",
            "Where a round's time goes",
            "Stages compiled apart and timed one after the other, at each head's best setting; the "
            "tick marks the whole round as the engine runs it.",
        ),
        (
            calibration,
            sure,
            "calibration",
            "Are confidences worth what they say?",
            "On the diagonal they are; below it the head is too sure. Larger dots hold more.",
        ),
    ]
    return [_figure(draw, found, *words) for draw, found, *words in plans if found]


def _known(every: Sequence[Series], key: str) -> list[Series]:
    """Those of which a rate is known at any position: a text may end before its first round."""
    return [each for each in every if any(v is not None for v in each.widest[key])]


def _figure(draw: Callable[..., None], found: list[Series], *words: str) -> Figure:
    import matplotlib

    with matplotlib.rc_context(_RULES):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        canvas = Canvas(figsize=(_WIDTH, 3.0), layout="constrained")
        FigureCanvasAgg(canvas)
        draw(canvas, found)
        svg, png = io.StringIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": "SpecJAX"})
        canvas.savefig(png, format="png", dpi=200, metadata={"Software": "SpecJAX"})
    name, title, caption = words
    return Figure(name, title, caption, svg.getvalue(), png.getvalue())


def speedup(canvas: Any, found: Sequence[Series]) -> None:
    """Bars of each head's best speedup, with what it is by."""
    canvas.set_size_inches(_WIDTH, 0.7 + 0.62 * len(found))
    axes = canvas.subplots()
    axes.grid(False)
    top = max(1.0, *(each.best["speedup_high"] or 0 for each in found))
    for y, each in enumerate(found):
        row = each.best
        low, mid, high = (row[f"speedup{end}"] or 0 for end in ("_low", "", "_high"))
        axes.barh(y, mid, height=0.36, color=colour(each.head))
        axes.plot([low, high], [y, y], color=_INK, linewidth=1.2, solid_capstyle="butt")
        drafts = row["num_speculative_tokens"]
        rate = f"{row['output_tokens_per_second']:,.0f} tok/s"
        note = f"{drafts} draft{'s' if drafts != 1 else ''}, {rate}"
        if len({r["concurrency"] for s in found for r in s.rows}) > 1:
            note = f"batch {row['concurrency']}, {note}"
        axes.annotate(each.name, (0, y), (0, 9), textcoords="offset points", va="bottom")
        _right(axes, note, y, 9, _MUTED)
        _at(axes, max(mid, high), y, f"{mid:.2f}{TIMES}")
    axes.axvline(1, color=_MUTED, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
    axes.set_xlim(0, 1.16 * top)
    axes.set_ylim(len(found) - 0.6, -0.85)
    axes.set_yticks([])
    axes.set_xlabel("times the baseline's output tokens per second (dashed: baseline)", fontsize=9)


def tokens(canvas: Any, found: Sequence[Series]) -> None:
    """Lines of speedup against num_speculative_tokens, at the batch measured at most widths."""
    axes = canvas.subplots()
    ends, batches = [], set()
    for each in found:
        by_batch: dict[int, list[Record]] = {}
        for row in each.rows:
            by_batch.setdefault(row["concurrency"], []).append(row)
        batch = max(by_batch, key=lambda b: (len(by_batch[b]), -b))
        batches.add(batch)
        rows = sorted(by_batch[batch], key=lambda row: row["num_speculative_tokens"])
        x = [row["num_speculative_tokens"] for row in rows]
        low, mid, high = ([r[f"speedup{end}"] for r in rows] for end in ("_low", "", "_high"))
        _line(axes, each, x, mid, (low, high))
        ends.append((mid[-1], each.name, colour(each.head)))
    axes.axhline(1, color=_MUTED, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
    widths = sorted({n for each in found for n in each.values("num_speculative_tokens")})
    axes.set_xticks(widths)
    _names_at_the_end(axes, ends, widths[0], widths[-1])
    at = ", ".join(map(str, sorted(batches)))
    axes.set_xlabel(f"drafts per round, batch {at} (dashed: baseline)", fontsize=9)
    axes.yaxis.set_major_formatter("{x:.2g}" + TIMES)


def acceptance(canvas: Any, found: Sequence[Series]) -> None:
    """Lines of acceptance by position, of all rounds, with intervals."""
    _by_position(canvas, found, "acceptance_rate_per_position")


def conditional(canvas: Any, found: Sequence[Series]) -> None:
    """Lines of acceptance by position, given the one before."""
    _by_position(canvas, found, "acceptance_rate_per_position_conditional")


def _by_position(canvas: Any, found: Sequence[Series], key: str) -> None:
    axes = canvas.subplots()
    ends, longest = [], 2
    for each in found:
        row = each.widest
        known = [(i + 1, v) for i, v in enumerate(row[key]) if v is not None]
        if not known:
            continue
        x, y = map(list, zip(*known, strict=True))
        band = row.get(f"{key}_interval")
        edges = zip(*(band[i - 1] for i in x), strict=True) if band else None
        _line(axes, each, x, y, edges)
        ends.append((y[-1], each.name, colour(each.head)))
        longest = max(longest, x[-1])
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, longest + 1))
    _names_at_the_end(axes, ends, 1, longest)
    axes.set_xlabel("draft position", fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def heat(canvas: Any, found: Sequence[Series]) -> None:
    """A map of speedup over widths and batches for each head."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    most = max(len(each.values("num_speculative_tokens")) for each in found)
    across = 2 if most <= 4 and len(found) > 1 else 1
    down = -(-len(found) // across)
    tall = max(len(each.values("concurrency")) for each in found)
    canvas.set_size_inches(_WIDTH, down * (0.7 + 0.34 * tall) + 0.2)
    every = [row["speedup"] for each in found for row in each.rows if row["speedup"]]
    norm = TwoSlopeNorm(1, min(0.6, *every), max(1.4, *every))
    shades = LinearSegmentedColormap.from_list("", ["#e8927c", "#f4f1ec", "#7db4e6"])
    panels = canvas.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(found) :]:
        axes.remove()
    for axes, each in zip(panels, found, strict=False):
        widths, batches = each.values("num_speculative_tokens"), each.values("concurrency")
        best = each.best
        for row in each.rows:
            x, y = widths.index(row["num_speculative_tokens"]), batches.index(row["concurrency"])
            value = row["speedup"]
            if value is None:
                continue
            kind = {"facecolor": shades(norm(value)), "zorder": 2}
            edge = {"edgecolor": _INK, "linewidth": 1.6, "zorder": 3} if row is best else {}
            _box(axes, x, y, kind | edge)
            weight = "bold" if row is best else "normal"
            axes.text(
                x,
                y,
                f"{value:.2f}",
                color=_CELL_INK,
                weight=weight,
                zorder=4,
                ha="center",
                va="center",
            )
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xlim(-0.55, len(widths) - 0.45)
        axes.set_ylim(len(batches) - 0.45, -0.55)
        axes.set_xticks(range(len(widths)), widths)
        axes.set_yticks(range(len(batches)), batches)
        axes.set_title(each.name, loc="left", fontsize=10, color=colour(each.head))
    canvas.supxlabel("drafts per round", fontsize=9, color=_MUTED)
    canvas.supylabel("batch", fontsize=9, color=_MUTED)


def _box(axes: Any, x: int, y: int, kind: dict[str, Any]) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, **kind))


def time_shares(canvas: Any, found: Sequence[Series]) -> None:
    """Stacked bars of the stages of a round, in milliseconds."""
    canvas.set_size_inches(_WIDTH, 1.05 + 0.62 * len(found))
    axes = canvas.subplots()
    axes.grid(False)
    parts = {
        "propose": ("draft", "propose_seconds"),
        "observe": ("draft: reading back", "observe_seconds"),
        "verify": ("verify", "forward_seconds"),
        "commit": ("other", "commit_seconds"),
    }
    longest = 0.0
    for y, each in enumerate(found):
        spent, left = each.best["time_shares"], 0.0
        for part, (name, key) in parts.items():
            wide = 1e3 * spent[key]
            shown = {"label": name} if y == 0 else {}
            axes.barh(y, wide, left=left, height=0.36, color=COLOURS[part][0], **shown)
            left += wide
        whole = 1e3 * spent["fused_round_seconds"]
        axes.plot([whole, whole], [y - 0.21, y + 0.21], color=_INK, linewidth=2.2)
        longest = max(longest, left, whole)
        axes.annotate(each.name, (0, y), (0, 9), textcoords="offset points", va="bottom")
        shares = f"draft {100 * spent['draft']:.0f} %, verify {100 * spent['verify']:.0f} %"
        _right(axes, shares, y, 10, _MUTED)
    axes.set_xlim(0, 1.04 * longest)
    axes.set_ylim(len(found) - 0.6, -0.85)
    axes.set_yticks([])
    axes.set_xlabel("milliseconds per round", fontsize=9)
    look = {"frameon": False, "fontsize": 9, "handlelength": 0.9, "columnspacing": 1.2}
    canvas.legend(loc="outside lower left", ncols=4, **look)


def calibration(canvas: Any, found: Sequence[Series]) -> None:
    """Share accepted against predicted probability, a dot per bin."""
    axes = canvas.subplots()
    axes.plot([0, 1], [0, 1], color=_MUTED, linewidth=1, linestyle=(0, (3, 3)))
    ends = []
    for each in found:
        judged = each.best["calibration"]
        x, y, count = (
            [bin_[key] for bin_ in judged["bins"]] for key in ("confidence", "accepted", "count")
        )
        axes.plot(x, y, each.style, color=colour(each.head), linewidth=1.4)
        sizes = [12 + 90 * n / max(count) for n in count]
        axes.scatter(x, y, s=sizes, color=colour(each.head), alpha=0.75, linewidths=0)
        error = judged["expected_calibration_error"]
        ends.append((y[-1], f"{each.name}\nerror {100 * error:.1f} %", colour(each.head)))
    axes.set_ylim(-0.03, 1.05)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    _names_at_the_end(axes, ends, 0, 1)
    axes.set_xlabel("confidence that the draft, and all before it, will be accepted", fontsize=9)
    axes.set_ylabel("share accepted", fontsize=9)


def _line(axes: Any, each: Series, x: list[int], y: list[float], edges: Any) -> None:
    kind = {"color": colour(each.head), "clip_on": False, "zorder": 3}
    axes.plot(x, y, each.style, marker="o", **kind)
    if edges is not None:
        low, high = edges
        axes.fill_between(x, low, high, color=colour(each.head), alpha=0.13, linewidth=0)


def _names_at_the_end(
    axes: Any, ends: list[tuple[float, str, str]], first: float, last: float
) -> None:
    """Write names right of where lines end, pushed apart where they would touch."""
    longest = max(len(line) for _, text, _ in ends for line in text.split("\n"))
    room = min(0.95, 0.022 * longest + 0.05) / (1 - min(0.5, 0.016 * longest))
    axes.set_xlim(first - 0.04 * (last - first), last + room * (last - first))
    low, high = axes.get_ylim()
    step = (high - low) * 0.075
    heights: list[float] = []
    for value, text, _ in sorted(ends):
        rows = text.count("\n") + 1
        least = heights[-1] + step * rows if heights else value
        heights.append(max(value, least))
    over = max(0.0, heights[-1] - high)
    for height, (_, text, shade) in zip(heights, sorted(ends), strict=True):
        axes.text(last + 0.04 * (last - first), height - over, text, color=shade, va="center")


def _right(axes: Any, text: str, y: float, up: float, shade: str) -> None:
    axes.annotate(
        text,
        (1, y),
        (0, up),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=shade,
        fontsize=9,
    )


def _at(axes: Any, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", weight="bold")
