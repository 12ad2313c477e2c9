"""Reports: tables on the terminal, report.md and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specjax.evaluation import plots, records
from specjax.evaluation.records import Record

WIDTH = 100  # columns that every table fits

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
    header = ["head", "tokens", "dtype", "batch", "tok/s", "decode tok/s", "speedup", "spread"]
    header += ["same dtype", "accept. length", "accept. rate", "identical"]
    lines = []
    for row in rows:
        spread = f"{number(row['speedup_low'])}-{number(row['speedup_high'])}"
        identical = row["identical"]
        lines.append(
            [
                row["head"],
                str(row["num_speculative_tokens"]),
                {"float32": "f32", "bfloat16": "bf16"}.get(row["dtype"], row["dtype"]),
                str(row["concurrency"]),
                number(row["output_tokens_per_second"], ",.1f"),
                number(row["decode_tokens_per_second"], ",.1f"),
                number(row["speedup"]),
                "" if row["head"] == "none" else spread,
                number(row["speedup_same_dtype"]),
                number(row["mean_acceptance_length"]),
                percent(row["acceptance_rate"]),
                "sampled" if identical is None else f"{identical}/{row['prompts']}",
            ]
        )
    return header, lines


def positions(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of acceptance by position; no lines where nothing was drafted."""
    drafted = [row for row in rows if row["acceptance_rate_per_position"]]
    most = max((row["num_speculative_tokens"] for row in drafted), default=0)
    header = ["head", "tokens", "acceptance", *(str(i + 1) for i in range(most))]
    lines = []
    for row in drafted:
        for name, key in (
            ("of all rounds", "acceptance_rate_per_position"),
            ("if the one before", "acceptance_rate_per_position_conditional"),
        ):
            shares = [number(value) for value in row[key]]
            shares += [""] * (most - len(shares))
            lines.append([row["head"], str(row["num_speculative_tokens"]), name, *shares])
    return header, lines


def times(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of time shares; no lines where they were not taken."""
    header = ["head", "tokens", "draft", "verify", "other", "sum of stages", "whole round"]
    header += ["round in the run"]
    lines = []
    for row in rows:
        shares = row["time_shares"]
        if not shares:
            continue
        lines.append(
            [
                row["head"],
                str(row["num_speculative_tokens"]),
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


def remarks(rows: Sequence[Record]) -> list[str]:
    """Return the sentences that the figures must not be read without."""
    said = []
    for row in rows:
        rates = row["baseline_output_tokens_per_second"]
        if row["head"] == "none":
            each = ", ".join(f"{number(rate, ',.1f')} in {name}" for name, rate in rates.items())
            said.append(f"Baseline output tokens/s: {each}; speedups are against the fastest.")
            continue
        name = plots.label(row)
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
    for title, (header, lines) in _tables(rows):
        grid = Table(
            title=title, title_justify="left", pad_edge=False, collapse_padding=True, box=None
        )
        for i, name in enumerate(header):
            grid.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
        for line in lines:
            grid.add_row(*line)
        console.print(grid, width=width)
        console.print()
    for remark in remarks(rows):
        console.print(remark, width=width, highlight=False, markup=False)


def write(directory: Path) -> None:
    """Write report.md and figures of all records in a results directory."""
    import jinja2

    rows = records.read(directory)
    figures = plots.write_all(rows, directory)
    facts = rows[-1]["machine"]
    text = (
        jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined)
        .from_string(_TEMPLATE)
        .render(
            rows=rows,
            notes=list(dict.fromkeys(note for row in rows for note in row["notes"])),
            tables=[
                (title, {"header": header, "lines": lines})
                for title, (header, lines) in _tables(rows)
            ],
            remarks=remarks(rows),
            figures=[path.name for path in figures],
            machine=", ".join(f"{key} {value}" for key, value in facts.items() if value),
        )
    )
    records.write_whole(directory / "report.md", text)


def _tables(rows: Sequence[Record]) -> list[tuple[str, tuple[list[str], list[list[str]]]]]:
    tables = [
        ("Runs", summary(rows)),
        ("Acceptance by draft position", positions(rows)),
        ("Time of one round", times(rows)),
    ]
    return [(title, table) for title, table in tables if table[1]]
