"""`specjax report`: rebuilds from results.jsonl alone, compares, and refuses in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specjax import cli
from specjax.evaluation import records
from tests.evaluation.conftest import (  # noqa: F401  (fixtures)
    base,
    config,
    opened,
    rows,
    subject,
)


@pytest.fixture
def run(rows: Any, tmp_path: Path) -> Path:  # noqa: F811
    records.append(rows, tmp_path / "run")
    return tmp_path / "run"


def test_rebuilds(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["report", str(run / "results.jsonl")]) == 0
    assert (run / "report.html").is_file() and (run / "report.md").is_file()
    assert "Acceptance by draft position" in capsys.readouterr().out
    assert cli.main(["report", str(run), "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "report.html").read_text() == (run / "report.html").read_text()


def test_compares(run: Path, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "page.html"
    assert cli.main(["report", str(run), str(run), f"--out={page}"]) == 0
    assert "within noise" in capsys.readouterr().out
    assert "Before and after" in page.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "takes the directory of a run"),
        (["nowhere"], "no results at nowhere/results.jsonl"),
        (["nowhere", "--out"], "--out names no path"),
        (["--fast"], "unknown flag --fast"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: Any) -> None:
    assert cli.main(["report", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert cli.main(["report", "--help"]) == 0


def test_results_without_a_whole_record(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "results.jsonl").write_text('{"schema_version": 2, "he')
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "holds no records that can be read" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
