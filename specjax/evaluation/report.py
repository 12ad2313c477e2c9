"""Reports: tables on the terminal, and report.md."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.evaluation import records
from specjax.evaluation.records import Record
from specjax.evaluation.sweep import DRAFTING_ENGINE

WIDTH = 100  # columns that every table fits
_COLUMNS = {
    "dtype": "dtype",
    "concurrency": "batch",
    "temperature": "T",
    "mesh": "mesh",
    "prompts_source": "prompts",
    "target": "target",
    "head_source": "from",
}
# Settings that the tables show anyhow, or that stand in a column above under another name.
_DRAFTING = {"head_source", *(f"engine.{name}" for name in DRAFTING_ENGINE)}
_SHOWN = {"head", "num_speculative_tokens", "prompts", "trace", "out", "engine.mesh"}

_TEMPLATE = """\
# Evaluation of {{ rows[0].target }}

{% for note in notes %}> {{ note }}

{% endfor -%}
{% for name, table in tables %}
## {{ name }}

| {{ table.header | join(" | ") }} |
|{% for _ in table.header %}---|{% endfor %}
{% for line in table.lines %}| {{ line | join(" | ") }} |
{% endfor %}
{%- endfor %}
{% for remark in remarks %}
- {{ remark }}
{%- endfor %}
{% for figure in figures %}
![{{ figure }}]({{ figure }})
{% endfor %}
## Machine

{{ machine }}

Formulas and vLLM's names of these figures: docs/metrics.md. All figures with full precision,
settings included: results.jsonl. `config.gin`, where there is one, replays the last run.
"""


def number(value: float | None, form: str = ".2f") -> str:
    """Format a figure; "n/a" where there is none."""
    return "n/a" if value is None else format(value, form)


def percent(value: float | None) -> str:
    """Format a share as a percentage."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def summary(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of the main table, one line per run."""
    tell = {"dtype": "dtype", "batch": "concurrency"} | telling(rows)
    lines = []
    for row in rows:
        if row["error"]:
            continue
        spread = f"{number(row['speedup_low'])}-{number(row['speedup_high'])}"
        identical = row["identical"]
        figures = {
            "tok/s": number(row["output_tokens_per_second"], ",.1f"),
            "decode tok/s": number(row["decode_tokens_per_second"], ",.1f"),
            "speedup": number(row["speedup"]),
            "spread": "" if row["head"] == "none" else spread,
            "same dtype": number(row["speedup_same_dtype"]),
            "accept. length": number(row["mean_acceptance_length"]),
            "accept. rate": percent(row["acceptance_rate"]),
            "identical": "sampled" if identical is None else f"{identical}/{row['prompts']}",
        }
        first = {"head": row["head"], "tokens": str(row["num_speculative_tokens"])}
        told = dict(zip(tell, _cells(row, tell, rows), strict=True))
        lines.append(first | told | figures)
    for name in ("decode tok/s", "accept. rate", "same dtype"):
        if _width(lines) > WIDTH:  # room for what tells runs apart
            for line in lines:
                del line[name]
    header = list(lines[0]) if lines else []
    return header, [list(line.values()) for line in lines]


def _width(lines: Sequence[Mapping[str, str]]) -> int:
    """Return how wide a table is whose headers fold at blanks and whose cells do not."""
    cells = ((name, [line[name] for line in lines]) for name in (lines[0] if lines else ()))
    return sum(1 + max(map(len, (*name.split(), *values))) for name, values in cells)


def positions(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of acceptance by position; no lines where nothing was drafted."""
    drafted = [row for row in rows if row["acceptance_rate_per_position"]]
    tell = telling(rows)
    most = max((row["num_speculative_tokens"] for row in drafted), default=0)
    header = ["head", "tokens", *tell, "acceptance", *(str(i + 1) for i in range(most))]
    lines = []
    for row in drafted:
        for name, key in (
            ("of all rounds", "acceptance_rate_per_position"),
            ("if the one before", "acceptance_rate_per_position_conditional"),
        ):
            shares = [number(value) for value in row[key]]
            shares += [""] * (most - len(shares))
            first = [row["head"], str(row["num_speculative_tokens"]), *_cells(row, tell, rows)]
            lines.append([*first, name, *shares])
    return header, lines


def times(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of time shares; no lines where they were not taken."""
    tell = telling(rows)
    header = ["head", "tokens", *tell, "draft", "verify", "other", "sum of stages", "whole round"]
    header += ["round in the run"]
    lines = []
    for row in rows:
        shares = row.get("time_shares")
        if not shares:
            continue
        lines.append(
            [
                row["head"],
                str(row["num_speculative_tokens"]),
                *_cells(row, tell, rows),
                *(percent(shares[part]) for part in ("draft", "verify", "other")),
                *(
                    f"{number(None if shares[key] is None else 1e3 * shares[key])} ms"
                    for key in (
                        "sum_of_stages_seconds",
                        "fused_round_seconds",
                        "run_round_seconds",
                    )
                ),
            ]
        )
    return header, lines


def latencies(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of what a request waits for, of memory and of right answers."""
    tell = telling(rows)
    header = ["head", "tokens", *tell, "first token", "p90", "latency", "p90", "per token"]
    header += ["peak memory", "accuracy"]

    def milliseconds(row: Record, name: str, which: str) -> str:
        found = row[name]
        return "n/a" if found is None else f"{1e3 * found[which]:,.1f} ms"

    lines = []
    for row in rows:
        if row["error"]:
            continue
        peak = row["peak_memory_bytes"]
        first = [row["head"], str(row["num_speculative_tokens"]), *_cells(row, tell, rows)]
        waits = [
            milliseconds(row, f"{name}_seconds", which)
            for name, which in (
                ("time_to_first_token", "median"),
                ("time_to_first_token", "p90"),
                ("latency", "median"),
                ("latency", "p90"),
                ("time_per_output_token", "median"),
            )
        ]
        memory = "n/a" if peak is None else f"{peak / 1e9:.2f} GB"
        lines.append([*first, *waits, memory, percent(row["accuracy"])])
    return header, lines


def telling(rows: Sequence[Record]) -> dict[str, str]:
    """Return what tells runs of one head and width apart: headers of columns, names of settings."""
    drafting = [row for row in rows if row["head"] != "none"]
    each_set = [settings(row) for row in drafting]
    names = {name for each in each_set for name in each} - _SHOWN
    varying = {name for name in names if len({str(each.get(name)) for each in each_set}) > 1}
    kinds = {row["head"]: row["head_source"] for row in drafting}
    if all(kinds[row["head"]] == row["head_source"] for row in drafting):
        varying.discard("head_source")
    known = [name for name in _COLUMNS if name in varying]
    others = sorted(varying - set(known))
    return {_COLUMNS.get(name, name.rpartition(".")[2]): name for name in (*known, *others)}


def settings(row: Record) -> dict[str, Any]:
    """Return what a run was set to, as `engine.verification`; its head as where it came from."""
    flat: dict[str, Any] = {"mesh": "one device"}  # as it was before records said so
    for name, value in row["configuration"].items():
        nested = value.items() if isinstance(value, dict) else ()
        flat |= {f"{name}.{inner}": item for inner, item in nested} or {name: value}
    return flat | {name: row[name] for name in _COLUMNS if name in row}


def apart(row: Record, rows: Sequence[Record]) -> dict[str, str]:
    """Return what tells a run apart from others of its head and width, by header of the column."""
    tell = telling(rows)
    return dict(zip(tell, _cells(row, tell, rows), strict=True))


def _cells(row: Record, tell: Mapping[str, str], rows: Sequence[Record]) -> list[str]:
    """Return what stands in the columns that tell runs apart."""
    own, others = settings(row), [settings(other) for other in rows]
    if row["head"] == "none":  # nor was it set to anything that only drafting depends on
        own = {name: value for name, value in own.items() if name not in _DRAFTING}
    return [
        _short(str(own.get(name)), [str(other.get(name)) for other in others])
        for name in tell.values()
    ]


def _short(path: str, others: Sequence[str]) -> str:
    """Return the part of a path in which several differ; what is no path stays as it is."""
    if "/" not in path:
        return {"float32": "f32", "bfloat16": "bf16", "None": ""}.get(path, path)
    parts = [Path(other).parts for other in {path, *others} if "/" in other]
    own = Path(path).parts
    if len(parts) == 1:
        return own[-1]
    first, last = _shared(parts), len(own) - _shared([each[::-1] for each in parts])
    return "/".join(own[first:last] or own[-1:])


def _shared(paths: Sequence[tuple[str, ...]]) -> int:
    """Count the first parts that all have in common."""
    columns = zip(*paths, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def remarks(rows: Sequence[Record]) -> list[str]:
    """Return the sentences that the figures must not be read without."""
    said = []
    tell = telling(rows)
    for row in rows:
        which = zip(tell, _cells(row, tell, rows), strict=True)
        apart = "".join(f", {name} {value}" for name, value in which if value)
        if row["error"]:
            drafts = row["num_speculative_tokens"]
            said.append(f"FAILED: {row['head']}, {drafts} tokens{apart}: {row['error']}")
            continue
        rates = row["baseline_output_tokens_per_second"]
        if row["head"] == "none":
            parts = [f"{number(rate, ',.1f')} tokens/s in {name}" for name, rate in rates.items()]
            said.append(f"Baseline{apart}: {', '.join(parts)}; speedups are against the fastest.")
            continue
        name = label(row) + apart
        if row["dtype"] != row["baseline_dtype"]:
            said.append(
                f"{name} ran in {row['dtype']}, but the baseline is faster in"
                f" {row['baseline_dtype']}: try Eval.dtype={row['baseline_dtype']}."
            )
        if row["differing"]:
            said.append(
                f"{name}: {row['differing']} of {row['prompts']} texts differ from the"
                f" {row['dtype']} baseline, {row['near_ties']} of them at a near-tie (a gap of at"
                f" most {row['near_tie_bound']:.2%} of the best logit); one flip in"
                f" {1 / row['flip_rate']:,.0f} tokens."
            )
            if row["near_ties"] < row["differing"]:
                said.append(f"{name}: NOT LOSSLESS: some texts differ beyond a near-tie.")
    return said


def show(rows: Sequence[Record], console: Console) -> None:
    """Print the tables and remarks."""
    width = min(console.width, WIDTH)
    for title, (header, lines) in tables(rows):
        grid = Table(
            title=title, title_justify="left", pad_edge=False, collapse_padding=True, box=None
        )
        for i, name in enumerate(header):
            # Folded here: rich would narrow the widest column first, whatever its cells need.
            folded = name.replace(" ", "\n")
            grid.add_column(folded, justify="left" if i == 0 else "right", overflow="fold")
        for line in lines:
            grid.add_row(*line)
        console.print(grid, width=width)
        console.print()
    for remark in remarks(rows):
        console.print(remark, width=width, highlight=False, markup=False)


def label(row: Record) -> str:
    """Return the name of a run in sentences."""
    if row["head"] == "none":
        return "baseline"
    return f"{row['head']}, {row['num_speculative_tokens']} tokens"


def write(directory: Path, rows: Sequence[Record], figures: Sequence[str] = ()) -> None:
    """Write report.md of records into a results directory.

    Args:
        directory: where.
        rows: the records.
        figures: paths of its figures, below the directory.
    """
    import jinja2

    facts = rows[-1]["machine"]
    text = (
        jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined)
        .from_string(_TEMPLATE)
        .render(
            rows=rows,
            notes=list(dict.fromkeys(note for row in rows for note in row["notes"])),
            tables=[
                (title, {"header": header, "lines": lines})
                for title, (header, lines) in tables(rows)
            ],
            remarks=remarks(rows),
            figures=figures,
            machine=", ".join(f"{key} {value}" for key, value in facts.items() if value),
        )
    )
    records.write_whole(directory / "report.md", text)


def tables(rows: Sequence[Record]) -> list[tuple[str, tuple[list[str], list[list[str]]]]]:
    """Return (title, (header, lines)) of every table that there are lines for."""
    found = [
        ("Runs", summary(rows)),
        ("Acceptance by draft position", positions(rows)),
        ("Waiting, memory and answers", latencies(rows)),
        ("Time of one round", times(rows)),
    ]
    return [(title, table) for title, table in found if table[1]]
