"""Tables fit the terminal, reports say what must be said."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
from rich.console import Console

from specjax.core.errors import DataError
from specjax.evaluation import records, report
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.html import page
from specjax.evaluation.records import Record
from tests.evaluation.conftest import cell_of


def wide(rows: list[Record]) -> list[Record]:
    """Return the rows with the longest values that real runs have."""
    row = copy.deepcopy(rows[1])
    row |= {"head": "gemma4_mtp", "num_speculative_tokens": 15, "concurrency": 128}
    row |= {"output_tokens_per_second": 123456.7, "decode_tokens_per_second": 123456.7}
    row |= {"prompts": 1319, "identical": 1319, "speedup_low": 10.01, "speedup_high": 10.99}
    row |= {"acceptance_rate_per_position": [0.5] * 15, "head_source": "runs/a/head"}
    row |= {"acceptance_rate_per_position_conditional": [0.5] * 15}
    for key in ("acceptance_rate_per_position", "acceptance_rate_per_position_conditional"):
        row[f"{key}_interval"] = [[0.4, 0.6]] * 15
    return [*rows, row]


def shown(rows: list[Record], width: int = 200) -> str:
    out = io.StringIO()
    report.show(rows, Console(file=out, width=width))
    return out.getvalue()


def test_tables_fit_a_hundred_columns(rows: list[Record]) -> None:
    text = shown(wide(rows))
    assert max(map(len, text.splitlines())) <= 100
    assert "1319/1319" in text  # not folded


def test_missing_figures_read_na(rows: list[Record]) -> None:
    """F69: nothing drafted."""
    header, lines = report.summary(rows)
    base = dict(zip(header, lines[0], strict=True))
    assert base["accept. length"] == base["accept. rate"] == "n/a"
    assert "nan" not in shown(rows).lower()


def test_remarks_tell_of_the_other_dtype_and_of_differences(rows: list[Record]) -> None:
    row = copy.deepcopy(rows[1])
    row |= {"baseline_dtype": "bfloat16", "dtype": "float32"}
    row |= {"differing": 2, "near_ties": 2, "flip_rate": 0.01, "near_tie_bound": 1 / 64}
    said = " ".join(report.remarks([row]))
    assert "try Eval.dtype=bfloat16" in said
    assert "2 of 4 texts differ" in said
    assert "at most 1.56% of the best logit" in said
    assert "one flip in 100 tokens" in said
    assert "NOT LOSSLESS" not in said
    row["near_ties"] = 1
    assert "NOT LOSSLESS" in " ".join(report.remarks([row]))


def test_report_of_all_records(rows: list[Record], tmp_path: Path) -> None:
    records.append(wide(rows), tmp_path)
    every = records.read(tmp_path)
    report.write(tmp_path, every, page.write(tmp_path, every))
    text = (tmp_path / "report.md").read_text()
    for name in ("figures/speedup.png", "figures/acceptance.png", "figures/time_shares.png"):
        assert f"({name})" in text
        assert (tmp_path / name).stat().st_size > 5000
    assert "| gemma4_mtp | 15 |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_runs_are_told_apart_by_what_differs(rows: list[Record]) -> None:
    warm = copy.deepcopy(rows[1]) | {"temperature": 0.8, "head_source": "runs/b/head"}
    cold = copy.deepcopy(rows[1]) | {"head_source": "runs/a/head"}
    both = [rows[0], cold, warm]
    assert report.telling(both) == {"T": "temperature", "from": "head_source"}
    header, lines = report.summary(both)
    told = [dict(zip(header, line, strict=True)) for line in lines]
    assert [(row["T"], row["from"]) for row in told[1:]] == [("0.0", "a"), ("0.8", "b")]
    assert max(map(len, shown(both).splitlines())) <= 100
    assert report.telling(rows) == {}


def test_any_setting_tells_runs_apart(rows: list[Record]) -> None:
    """Not the baseline, where only drafting depends on it; columns make room for its name."""
    other = copy.deepcopy(rows[1])
    other["configuration"]["engine"]["verification"] = "early_stop"
    other |= {"prompts": 1319, "identical": 1319, "output_tokens_per_second": 123456.7}
    both = [*rows, other]
    assert report.telling(both) == {"verification": "engine.verification"}
    header, lines = report.summary(both)
    assert [dict(zip(header, line, strict=True))["verification"] for line in lines] == [
        "",
        "fixed",
        "early_stop",
    ]
    assert "speedup" in header and "decode tok/s" not in header
    text = shown(both)
    assert "early_stop" in text and max(map(len, text.splitlines())) <= 100


def test_failures_are_remarks_and_no_lines(rows: list[Record], config: EvalConfig) -> None:
    context = records.Context("now", {})
    bad = records.failure(cell_of(config), DataError("no such head"), "tiny", context)
    assert "FAILED: known, 3 tokens: no such head" in shown([*rows, bad])
    assert len(report.summary([*rows, bad])[1]) == 2
    assert "no such head" in shown([bad])


@pytest.mark.parametrize(
    ("path", "others", "short"),
    [
        ("a/b/c", ["a/x/c", "a/b/c"], "b"),
        ("a/b", ["a/b/c"], "b"),
        ("a/b/c", ["a/b"], "c"),
        ("/m/one", ["/n/one"], "m"),
        ("ngram", ["a/b"], "ngram"),
        ("p/gsm8k.jsonl", ["p/gsm8k.jsonl"], "gsm8k.jsonl"),
        ("bfloat16", [], "bf16"),
    ],
)
def test_short_names(path: str, others: list[str], short: str) -> None:
    assert report._short(path, others) == short
