"""The short scripts of the common studies, on a tiny target."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from specjax import eval as door
from specjax.evaluation import records, runner
from tests.evaluation.conftest import checkpoint  # noqa: F401 (a fixture)

FAST = ["Eval.max_new_tokens=4", "Eval.repeats=1", "Eval.time_shares=False"]
FAST += ["Eval.baseline_dtypes=('float32',)"]


@pytest.fixture
def words(checkpoint: Path, tmp_path: Path) -> list[str]:  # noqa: F811
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["w3 w4 w3 w4"]}\n{"turns": ["w6"]}')
    given = [f"--target={checkpoint}", "--head=ngram", f"--prompts={prompts}"]
    return [*given, f"--out={tmp_path / 'out'}", *FAST]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("widths", "num_speculative_tokens"),
        ("temperatures", "temperature"),
        ("concurrency", "concurrency"),
        ("schedules", "Engine.verification"),
    ],
)
def test_what_each_sweeps(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own values, or those that the words give instead."""
    script = importlib.import_module(f"eval.{name}")
    taken: list[Any] = []

    def run_sweep(configs: Any, sweep: Any, operative: str) -> list[Any]:
        taken.append((configs, sweep))
        return []

    monkeypatch.setattr(runner, "run_sweep", run_sweep)
    argv = ["--target=t", "--head=h", "--prompts=p"]
    assert script.main(argv) == 0
    configs, sweep = taken[0]
    assert list(sweep.grid) == [key]
    assert len(configs) == len(sweep.grid[key]) >= 4
    own = {"widths": "9", "temperatures": "0.1", "concurrency": "3", "schedules": "budget"}[name]
    assert script.main([*argv, f"--sweep={key}={own}"]) == 0
    assert len(taken[1][0]) == 1


def test_a_study_runs(words: list[str], tmp_path: Path) -> None:
    script = importlib.import_module("eval.widths")
    assert script.main([*words, "--sweep=num_speculative_tokens=1,2"]) == 0
    rows = records.read(tmp_path / "out")
    assert [row["num_speculative_tokens"] for row in rows] == [0, 1, 2]


def test_calibration_of_a_head_without_confidences(words: list[str], capsys: Any) -> None:
    script = importlib.import_module("eval.calibration")
    assert script.main(words) == 0
    assert "ngram: no confidences" in capsys.readouterr().out
    assert script.main([*words, "--nonsense"]) == 2


def test_five_methods_names_what_cannot_run_and_goes_on(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A study without its checkpoint is skipped; the other's best widths are in the table."""
    script = importlib.import_module("eval.five_methods")
    folder = tmp_path / "configs"
    shutil.copytree(script.configs_dir(), folder)
    for study in script.studies():
        if study not in ("kimi_k2_5", "qwen3_8b"):
            (folder / "studies" / f"{study}.gin").unlink()
    common = folder / "studies" / "common.gin"
    common.write_text(common.read_text() + "\nSweep.grid = {'num_speculative_tokens': (1, 2)}\n")
    (folder / "studies" / "qwen3_8b.gin").write_text("include 'studies/common.gin'\n")
    broken = "include 'studies/common.gin'\nEval.target = './missing'\nEval.head = 'ngram'\n"
    (folder / "studies" / "kimi_k2_5.gin").write_text(broken)
    monkeypatch.setattr(script, "configs_dir", lambda: folder)
    monkeypatch.setattr("specjax.config.configs_dir", lambda: folder)
    monkeypatch.setattr("specjax.core.paths.configs_dir", lambda: folder)
    assert script.main(["--studies=nothing"]) == 2
    own = [word for word in words if not word.startswith("--out")]
    own += ["Eval.dtype=float32", f"--out={tmp_path / 'all'}"]
    alone = [word for word in own if not word.startswith(("--target", "--head"))]
    assert script.main(["--studies=kimi_k2_5", *alone]) == 2
    assert "no checkpoint directory at" in capsys.readouterr().err
    assert script.main(["--studies=qwen3_8b", *own]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[[line.split()[:1] == ["target"] for line in lines].index(True) + 1 :]
    assert [line.split()[1:3] for line in table] == [["ngram", "p"]]
    rows = records.read(tmp_path / "all/qwen3_8b")
    assert {row["num_speculative_tokens"] for row in rows} == {0, 1, 2}


def test_help_of_a_study_is_its_own(capsys: Any) -> None:
    assert importlib.import_module("eval.widths").main(["--help"]) == 0
    assert "How many tokens to draft" in capsys.readouterr().out
    assert door.main(["--help"]) == 0
