"""A plan for people: tables, a figure, and plan.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.evaluation.records import finite, write_whole
from specjax.planner.plan import DRAFT, OTHER, VERIFY, Plan, Point

WIDTH = 100
FIGURE, RECORD = "speedup.png", "plan.json"
_GB = 1e9
_NODE = 8  # devices


def show(plan: Plan, console: Console) -> None:
    """Print the plan."""
    width = min(console.width, WIDTH)

    def say(text: str) -> None:
        console.print(text, width=width, highlight=False, markup=False)

    config, chip, pair = plan.config, plan.chip, plan.pair
    say(
        f"{pair.target_name} with {pair.head_name} ({pair.head.name}), {config.dtype}, on"
        f" {config.mesh.devices} x {chip.name} ({config.mesh.name})"
    )
    say(
        f"A device: {chip.memory / _GB:,.0f} GB, {chip.bandwidth / _GB:,.0f} GB/s,"
        f" {chip.peak(config.dtype) / 1e12:,.4g} TFLOP/s in {config.dtype},"
        f" {chip.link / _GB:,.0f} GB/s to others. {chip.source}."
    )
    for title, grid in (
        ("Memory of a device, GB (10^9 bytes)", _memory(plan)),
        (f"One round at {plan.config.contexts[0]:,} tokens of context, a device", _steps(plan)),
        (_speedup_title(plan), _speedups(plan)),
    ):
        say(f"\n{title}")
        console.print(grid, width=width)
    for line in verdict(plan):
        say(line)


def _grid(*columns: str) -> Table:
    grid = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        grid.add_column(name, justify="right" if i else "left", no_wrap=True)
    return grid


def _memory(plan: Plan) -> Table:
    grid = _grid("context", "target", "head", "a lane", "temporaries", "lanes that fit")
    for context in plan.config.contexts:
        batch = plan.config.batches[-1]
        first = plan.at(plan.most, batch)[0].memory
        temporaries = plan.temporaries(batch, context)
        lane = (plan.needed(batch, context) - temporaries - first.target - first.head) / batch
        lanes = plan.most_lanes(context)
        grid.add_row(
            f"{context:,}",
            f"{first.target / _GB:,.2f}",
            f"{first.head / _GB:,.2f}",
            f"{lane / _GB:,.3f}",
            f"{temporaries / _GB:,.2f} at {batch}",
            f"{lanes:,}" if lanes else "does not fit",
        )
    return grid


def _steps(plan: Plan) -> Table:
    grid = _grid("lanes", "drafts", "part", "GFLOP", "GB moved", "MB sent", "ms", "bound by")
    batches = plan.config.batches
    for batch in dict.fromkeys((batches[0], batches[-1])):
        for drafts in (0, plan.most):
            point = plan.at(drafts, batch)[0]
            for i, (part, cost, seconds) in enumerate(parts(plan, point)):
                grid.add_row(
                    "" if i else str(batch),
                    "" if i else str(drafts),
                    part,
                    f"{cost.flops / 1e9:,.4g}",
                    f"{cost.bytes / _GB:,.4g}",
                    f"{cost.sent / 1e6:,.4g}",
                    f"{1e3 * seconds:,.3f}",
                    plan.chip.bound(cost),
                )
    return grid


def parts(plan: Plan, point: Point) -> list[tuple[str, Any, float]]:
    """Return (name, cost, seconds) of a round's parts: draft, verify, other."""
    found = []
    for name, stages in (("draft", DRAFT), ("verify", VERIFY), ("other", OTHER)):
        cost = point.cost.stage(*stages)
        if cost.bytes:
            found.append((name, cost, plan.chip.seconds(cost)))
    return found


def _speedup_title(plan: Plan) -> str:
    if plan.acceptance is None:
        return "Tokens per round from which on drafting pays, by drafts per round"
    rates = " ".join(f"{rate:.2f}" for rate in plan.acceptance.rates)
    return f"Expected speedup by drafts per round; accepted by position {rates}"


def _speedups(plan: Plan) -> Table:
    drafts = range(1, plan.most + 1)
    names = [f"{'' if k in plan.traced else '~'}{k}" for k in drafts]
    grid = _grid("context", "lanes", "tokens/s without", *names)
    for context in plan.config.contexts:
        for i, batch in enumerate(plan.config.batches):
            base = batch / plan.profile(batch, context).round_seconds(0)
            if plan.acceptance is None:
                cells = [f"{plan.break_even(k, batch, context):.2f}" for k in drafts]
            else:
                best, _ = plan.best(batch, context)
                values = [f"{plan.speedup(k, batch, context):.2f}" for k in drafts]
                cells = [
                    f"[bold]{v}[/]" if k == best else v for k, v in zip(drafts, values, strict=True)
                ]
            fits = plan.needed(batch, context) <= plan.room
            grid.add_row(
                "" if i else f"{context:,}",
                f"{batch}{'' if fits else '!'}",
                f"{base:,.1f}",
                *cells,
            )
    return grid


def verdict(plan: Plan) -> list[str]:
    """Return what the tables come to."""
    lines = []
    if any(
        plan.needed(b, c) > plan.room for b in plan.config.batches for c in plan.config.contexts
    ):
        lines.append("! does not fit the memory.")
    if set(plan.traced) != {0, *range(1, plan.most + 1)}:
        lines.append("~ is interpolated between traced rounds.")
    lines.append(
        "Seconds are the least that the chip's limits allow; temporaries are an upper estimate"
        " from the walk, no compiler's figure."
    )
    if plan.config.mesh.devices > _NODE and not plan.config.link_gb:
        lines.append(
            f"More than {_NODE} devices: the table's links end at a node of as many, give"
            " Plan.link_gb."
        )
    if plan.acceptance is None:
        lines.append("Give --acceptance, rates or an evaluation's directory, for speedups.")
        return lines
    lines.append(f"Acceptance: {plan.acceptance.source}.")
    fitting = [
        (batch, context, *plan.best(batch, context))
        for context in plan.config.contexts
        for batch in plan.config.batches
        if plan.needed(batch, context) <= plan.room
    ]
    if not fitting:
        return [*lines, "Nothing that was asked about fits: take more devices."]
    batch, context, k, gain = max(fitting, key=lambda each: each[3])
    if not k:
        return [*lines, "Speculation pays nowhere here."]
    lines.append(
        f"Best: {gain:.2f} times, at {_lanes(batch)} and {context:,} tokens, with"
        f" Eval.num_speculative_tokens={k}."
    )
    for context in plan.config.contexts:
        stops = [b for b, c, best, _ in fitting if c == context and not best]
        if stops:
            lines.append(f"At {context:,} tokens it stops paying at {_lanes(stops[0])}.")
        elif any(c == context for _, c, _, _ in fitting):
            lines.append(f"At {context:,} tokens it pays at every number of lanes that fits.")
    return lines


def _lanes(batch: int) -> str:
    return f"{batch} lane{'' if batch == 1 else 's'}"


def record(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON has it."""
    config = plan.config
    return {
        "target": plan.pair.target_name,
        "head": plan.pair.head_name,
        "algorithm": plan.pair.head.name,
        "chip": dataclasses.asdict(plan.chip),
        "configuration": dataclasses.asdict(config),
        "acceptance": None if plan.acceptance is None else dataclasses.asdict(plan.acceptance),
        "most_lanes": {str(context): plan.most_lanes(context) for context in config.contexts},
        "rounds": [
            {
                "num_speculative_tokens": point.drafts,
                "batch": point.batch,
                "context": point.context,
                "seconds": point.seconds,
                "temporaries_bytes": point.cost.temporaries,
                **{f"{k}_bytes": v for k, v in dataclasses.asdict(point.memory).items()},
                "parts": {
                    name: {
                        "flops": cost.flops,
                        "bytes": cost.bytes,
                        "sent": cost.sent,
                        "exchanges": cost.exchanges,
                        "steps": cost.steps,
                        "seconds": seconds,
                        "bound": plan.chip.bound(cost),
                    }
                    for name, cost, seconds in parts(plan, point)
                },
            }
            for point in plan.points
        ],
        "settings": [
            {
                "num_speculative_tokens": k,
                "batch": batch,
                "context": context,
                "break_even": plan.break_even(k, batch, context),
                "speedup": plan.speedup(k, batch, context) if plan.acceptance else None,
                "fits": plan.needed(batch, context) <= plan.room,
            }
            for context in config.contexts
            for batch in config.batches
            for k in range(1, plan.most + 1)
        ],
    }


def write(plan: Plan, directory: Path) -> None:
    """Write plan.json and the figure.

    Raises:
        DataError: the directory cannot be written.
    """
    content = json.dumps(finite(record(plan)), indent=1, allow_nan=False)
    write_whole(directory / RECORD, content + "\n")
    write_whole(directory / FIGURE, figure(plan))


def figure(plan: Plan) -> bytes:
    """Return a PNG: speedup (or what it takes to break even) over drafts, a line per batch."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    contexts, drafts = plan.config.contexts, range(1, plan.most + 1)
    canvas = Figure(figsize=(4.0 * len(contexts), 3.2), layout="constrained")
    FigureCanvasAgg(canvas)
    every = canvas.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for axes, context in zip(every, contexts, strict=True):
        for batch in plan.config.batches:
            value = plan.break_even if plan.acceptance is None else plan.speedup
            heights = [value(k, batch, context) for k in drafts]
            fits = plan.needed(batch, context) <= plan.room
            label = _lanes(batch) + ("" if fits else ", does not fit")
            axes.plot(drafts, heights, marker="o", ms=3, ls="-" if fits else ":", label=label)
        axes.axhline(1.0, color="0.6", lw=0.8)
        axes.set_xticks(list(drafts))
        axes.set_xlabel("drafts per round")
        axes.set_title(f"{context:,} tokens", fontsize="medium")
    known = plan.acceptance is not None
    every[0].set_ylabel("expected speedup" if known else "tokens per round to break even")
    every[-1].legend(fontsize="small", frameon=False)
    canvas.suptitle(
        f"{plan.pair.target_name}, {plan.pair.head_name}, {plan.config.mesh.devices} x"
        f" {plan.chip.name}",
        fontsize="medium",
    )
    png = io.BytesIO()
    canvas.savefig(png, format="png", dpi=150, metadata={"Software": "SpecJAX"})
    return png.getvalue()
