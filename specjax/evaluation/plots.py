"""PNG figures of an evaluation. matplotlib is imported where a figure is drawn, and not before."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax.evaluation.metrics import spread
from specjax.evaluation.records import Record, write_whole

# A palette that survives colour blindness (Okabe and Ito).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY = "#9a9a9a"
_RULES = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
}


def write_all(records: Sequence[Record], directory: Path) -> list[Path]:
    """Draw every figure that the records have data for; returns the paths written."""
    records = [row for row in records if not row["error"]]
    drafted = [row for row in records if row["acceptance_rate_per_position"]]
    timed = [row for row in records if row["time_shares"]]
    plans: list[tuple[str, Sequence[Record], Callable[..., None]]] = [
        ("throughput.png", records, throughput),
        ("acceptance.png", drafted, acceptance),
        ("time_shares.png", timed, time_shares),
    ]
    written = []
    for name, rows, draw in plans:
        if rows:
            write_whole(directory / name, _png(draw, rows))
            written.append(directory / name)
    return written


def label(row: Record) -> str:
    """Return the name of a run in figures."""
    if row["head"] == "none":
        return "baseline"
    return f"{row['head']}, {row['num_speculative_tokens']} tokens"


def labels(rows: Sequence[Record]) -> list[str]:
    """Return names of runs; what differs between runs of one name is added."""
    names = [label(row) for row in rows]
    columns = {"dtype": "", "concurrency": "batch ", "temperature": "T ", "target": ""}
    for key, short in columns.items():
        if len({row[key] for row in rows}) > 1:
            names = [f"{name}\n{short}{row[key]}" for name, row in zip(names, rows, strict=True)]
    return names


def _png(draw: Callable[..., None], rows: Sequence[Record]) -> bytes:
    import matplotlib

    with matplotlib.rc_context(_RULES):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, rows)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": "SpecJAX"})
    return buffer.getvalue()


def throughput(figure: Any, rows: Sequence[Record]) -> None:
    """Bars of output tokens per second, every repeat a dot, the speedup written above."""
    names, repeats, values, notes, colours = [], [], [], [], []
    for row, name in zip(rows, labels(rows), strict=True):
        is_baseline = row["head"] == "none"
        bars = {name.replace(", ", "\n"): row["output_tokens_per_second_repeats"]}
        if is_baseline:
            each = row["baseline_output_tokens_per_second_repeats"]
            bars = {f"baseline\n{dtype}": dots for dtype, dots in each.items()}
        for text, dots in bars.items():
            names.append(text)
            repeats.append([v for v in dots if v is not None])
            values.append(spread(dots).median or 0)
            speedup = None if is_baseline else row["speedup"]
            notes.append("" if speedup is None else f"{speedup:.2f}x")
            colours.append(_GREY if is_baseline else _COLOURS[0])
    figure.set_size_inches(max(4.2, 1.2 + 0.95 * len(names)), 3.4)
    axes = figure.subplots()
    at = range(len(names))
    axes.bar(at, values, width=0.6, color=colours)
    for x, (value, dots, note) in enumerate(zip(values, repeats, notes, strict=True)):
        axes.scatter([x] * len(dots), dots, s=9, color="black", zorder=3, linewidths=0)
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        text = f"{shown}\n{note}" if note else shown
        axes.annotate(
            text,
            (x, max([value, *dots])),
            textcoords="offset points",
            xytext=(0, 4),
            ha="center",
            fontweight="bold" if note else None,
        )
    axes.set_xticks(list(at), names)
    axes.set_ylabel("output tokens / s")
    axes.set_ylim(0, 1.22 * max([1e-9, *values, *(dot for dots in repeats for dot in dots)]))
    axes.grid(axis="x", visible=False)
    axes.set_title("Output throughput and speedup")


def acceptance(figure: Any, rows: Sequence[Record]) -> None:
    """Lines of acceptance by draft position: of all rounds, and given the position before."""
    axes = figure.subplots()
    longest = 0
    for row, name, colour in zip(rows, labels(rows), _cycle(len(rows)), strict=True):
        for key, style, fill, suffix in (
            ("acceptance_rate_per_position", "o-", colour, "of all rounds"),
            ("acceptance_rate_per_position_conditional", "o--", "white", "if the one before was"),
        ):
            points = [(i + 1, v) for i, v in enumerate(row[key]) if v is not None]
            longest = max([longest, *(i for i, _ in points)])
            text = f"{name}: {suffix}".replace("\n", ", ")
            axes.plot(
                *zip(*points, strict=True),
                style,
                color=colour,
                markerfacecolor=fill,
                markersize=5,
                label=text,
                clip_on=False,
                zorder=3,
            )
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("draft position")
    axes.set_ylabel("share accepted")
    axes.set_title("Acceptance by draft position")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.set_size_inches(6.4, 3.4 + 0.2 * len(rows))


def time_shares(figure: Any, rows: Sequence[Record]) -> None:
    """Stacked bars of the stages of one round, the whole round as the engine runs it marked."""
    figure.set_size_inches(6.4, 1.5 + 0.55 * len(rows))
    axes = figure.subplots()
    parts = (
        ("draft: propose", "propose_seconds", _COLOURS[0]),
        ("draft: observe", "observe_seconds", _COLOURS[4]),
        ("verify: target", "forward_seconds", _COLOURS[1]),
        ("other: commit", "commit_seconds", _GREY),
    )
    at = list(range(len(rows)))
    left = [0.0] * len(rows)
    for name, key, colour in parts:
        widths = [1e3 * row["time_shares"][key] for row in rows]
        axes.barh(at, widths, left=left, height=0.5, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    fused = [1e3 * row["time_shares"]["fused_round_seconds"] for row in rows]
    axes.scatter(fused, at, marker="|", s=180, color="black", linewidths=2, label="whole round")
    axes.set_yticks(at, labels(rows))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per round")
    axes.grid(axis="y", visible=False)
    axes.set_title("Where a round's time goes (stages compiled apart)")
    handles = axes.get_legend_handles_labels()
    figure.legend(
        *handles, loc="outside lower center", ncols=5, columnspacing=1.0, handletextpad=0.5
    )


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]
