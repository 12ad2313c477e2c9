"""Sweeps: what a cell is known by, what shares a baseline, and going on after an interruption."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specjax import eval as door
from specjax.core.errors import CheckpointError, ConfigError, DataError
from specjax.evaluation import fingerprints, records, runner, sweep
from specjax.evaluation.config import EvalConfig, SweepConfig, cell_settings, listed
from specjax.heads.plain_config import NgramConfig

SMALL = {"max_new_tokens": 6, "repeats": 1, "time_shares": False, "baseline_dtypes": ("float32",)}


@pytest.fixture
def made(checkpoint: Path, tmp_path: Path) -> EvalConfig:
    """An evaluation of prompt lookup on the tiny target; its prompts are beside its results."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["w3 w4 w5 w3 w4"]}\n{"turns": ["w6"], "answer": "w7"}')
    out = str(tmp_path / "out")
    return EvalConfig(str(checkpoint), "ngram", str(prompts), out=out, **SMALL)


def words(config: EvalConfig) -> list[str]:
    """The command line of an evaluation."""
    return [
        f"--target={config.target}",
        f"--head={config.head}",
        f"--prompts={config.prompts}",
        f"--out={config.out}",
        *(f"Eval.{name}={value!r}" for name, value in SMALL.items()),
    ]


def key(config: EvalConfig, **changes: Any) -> str:
    (cell,) = sweep.plan([dataclasses.replace(config, **changes)])
    return cell.key


def test_grid_is_every_combination_in_order() -> None:
    grid = {"num_speculative_tokens": (1, 3), "Engine.verification": ("fixed", "budget")}
    found = cell_settings(SweepConfig(grid=grid))
    assert [tuple(each.values()) for each in found] == [
        (1, "fixed"),
        (1, "budget"),
        (3, "fixed"),
        (3, "budget"),
    ]
    assert set(found[0]) == {"Eval.num_speculative_tokens", "Engine.verification"}
    assert cell_settings(SweepConfig()) == [{}]


def test_cells_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"concurrency": 2}\n{"temperature": 0.5, "Eval.seed": 1}\n')
    found = cell_settings(SweepConfig(cells=str(path)))
    assert found == [{"Eval.concurrency": 2}, {"Eval.temperature": 0.5, "Eval.seed": 1}]
    with pytest.raises(DataError, match="no such file"):
        cell_settings(SweepConfig(cells="missing.jsonl"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"grid": {"a": (1,)}, "cells": "f"}, "either a grid"),
        ({"grid": {"a": ()}}, "no value for a"),
        ({"together": 0}, "Sweep.together is 0"),
    ],
)
def test_sweeps_that_cannot_be_meant(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SweepConfig(**given)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--sweep=nonsense=1,2", "Eval.nonsense in the sweep: Eval has no parameter 'nonsense'"),
        ("--sweep=Engin.capacity=1", "no configurable named 'Engin'; did you mean 'Engine'?"),
        ("--sweep=num_speculative_tokens=1,two", "takes int, got 'two' in the sweep"),
        ("--sweep=repeats=1,0", "Eval.repeats is 0"),
        ("--sweep=repeats", "'repeats' should read NAME=V1,V2"),
        ("--sweep=repeats=", "should read NAME=V1,V2"),
        ("--sweep=out=a,b", "Eval.out cannot be swept"),
        ("--sweep-cells=missing.jsonl", "no such file: missing.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    made: EvalConfig, capsys: Any, flag: str, said: str
) -> None:
    assert door.main([*words(made), flag]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
    assert not Path(made.out).exists()


def test_the_command_line_spells_values() -> None:
    given = [
        "--sweep",
        "head=a/b,ngram",
        "x=1",
        "--sweep=taps=(1, 2),None",
        "--sweep",
        "t=0.5,1e-3",
    ]
    kept, grid = door.with_grid(given)
    assert kept == "x=1"
    assert grid == (
        "Sweep.grid={'head': ('a/b', 'ngram'), 'taps': ((1, 2), None), 't': (0.5, 0.001)}"
    )
    with pytest.raises(ConfigError, match="names a twice"):
        door.with_grid(["--sweep", "a=1", "--sweep", "a=2"])


def test_lists_of_heads_and_prompts() -> None:
    config = EvalConfig("t", "a, b", "p,q")
    found = [(each.prompts, each.head) for each in listed(config)]
    assert found == [("p", "a"), ("p", "b"), ("q", "a"), ("q", "b")]
    assert list(listed(EvalConfig())) == [EvalConfig()]


def test_a_key_is_of_contents_and_settings_alone(made: EvalConfig, tmp_path: Path) -> None:
    own = key(made)
    copy = tmp_path / "another.jsonl"
    copy.write_text(Path(made.prompts).read_text())
    assert key(made, prompts=str(copy), out="elsewhere", num_prompts=2) == own
    for changes in (
        {"num_speculative_tokens": 2},
        {"temperature": 0.5},
        {"num_prompts": 1},
        {"repeats": 2},
        {"ngram": NgramConfig(longest=2)},
        {"engine": dataclasses.replace(made.engine, draft_sampling="greedy")},
    ):
        assert key(made, **changes) != own
    copy.write_text(copy.read_text().replace("w6", "w8"))
    assert key(made, prompts=str(copy)) != own


def test_baselines_are_one_where_only_drafting_differs(made: EvalConfig) -> None:
    engine = dataclasses.replace(made.engine, verification="budget", argmax_confidence=True)
    drafting = [made, dataclasses.replace(made, num_speculative_tokens=2, engine=engine)]
    others = [dataclasses.replace(made, concurrency=2), dataclasses.replace(made, temperature=0.5)]
    plain = dataclasses.replace(made, head="none")
    cells = sweep.plan([*drafting, *others, plain, made, plain])
    assert len(cells) == 5  # a cell given twice is one
    first, second, *rest, none = cells
    assert first.baseline == second.baseline == none.key == none.baseline
    assert none.is_baseline and not first.is_baseline
    assert len({first.baseline, *(cell.baseline for cell in rest)}) == 3
    sizes = [len(window) for window in sweep.windows(cells, 2)]
    assert sizes == [2, 1, 1, 1]
    # Three of one baseline, at most two together; the others have their own.
    assert [cell.key for cell in next(sweep.windows(cells, 3))] == [first.key, second.key, none.key]


def test_checkpoints_are_told_apart_by_any_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(6 << 20))
    prints = {fingerprints.of_checkpoint(str(tmp_path))}
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    prints.add(fingerprints.of_checkpoint(str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    prints.add(fingerprints.of_checkpoint(str(tmp_path)))
    assert len(prints) == 3
    with pytest.raises(CheckpointError):
        fingerprints.of_checkpoint(str(tmp_path / "none"))


def test_twelve_cells_killed_twice_are_twelve_records(
    made: EvalConfig, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The kill comes while a record is written; the file is cut in the middle of a line besides."""
    argv = [*words(made), "--sweep=num_speculative_tokens=1,2,3", "--sweep=seed=0,1"]
    argv += ["--sweep=temperature=0,0.7", "Sweep.together=2"]
    written: list[str] = []
    original = records.append

    def killed(rows: Any, directory: Path) -> None:
        rows = list(rows)
        original(rows, directory)
        written.extend(row["cell"] for row in rows)
        if len(written) in (5, 11):
            raise KeyboardInterrupt

    monkeypatch.setattr(records, "append", killed)
    path = Path(made.out) / "results.jsonl"
    assert door.main(argv) == 130
    assert len(path.read_text().splitlines()) == 5
    with path.open("a") as file:
        file.write('{"schema_version": 2, "cell": "a3')
    assert door.main(argv) == 130
    assert "no whole record; skipped" in capsys.readouterr().err
    assert door.main(argv) == 0
    rows = records.read(path.parent, lambda _: None)
    assert len(written) == len(set(written)) == len(rows)
    cells = [row for row in rows if row["head"] != "none"]
    assert len(cells) == 12
    settings = {
        (r["num_speculative_tokens"], r["temperature"], r["configuration"]["seed"]) for r in cells
    }
    assert len(settings) == 12
    # Greedy texts do not depend on the seed, but no one says so: four baselines.
    assert len(rows) - len(cells) == 4
    assert all(row["identical"] == 2 for row in cells if row["temperature"] == 0)
    before = path.read_bytes()
    assert door.main(argv) == 0
    assert path.read_bytes() == before
    assert "12 of 12 cells are done already" in capsys.readouterr().out
    replay = [f"--gin_file={path.parent / 'config.gin'}"]
    assert door.main(replay) == 0
    assert path.read_bytes() == before


def test_a_failing_cell_is_recorded_and_the_rest_go_on(made: EvalConfig, capsys: Any) -> None:
    argv = [*words(made), "--sweep=head=ngram,mtp", "--sweep=num_speculative_tokens=2,500"]
    assert door.main(argv) == 1
    rows = records.read(Path(made.out))
    found = {(row["head"], row["num_speculative_tokens"]): row["error"] for row in rows}
    assert found[("none", 0)] is None and found[("ngram", 2)] is None
    assert "positions in all" in found[("ngram", 500)]
    assert "no" in found[("mtp", 2)] and found[("mtp", 2)] == found[("mtp", 500)]
    assert len(rows) == 5
    printed = capsys.readouterr().out
    assert "FAILED: ngram, 500 tokens" in printed
    # Run again they are left alone; on request the failed ones, and these alone, are retried.
    assert door.main(argv) == 1
    assert records.read(Path(made.out)) == rows
    assert door.main([*argv, "Sweep.retry=True"]) == 1
    again = records.read(Path(made.out))
    assert len(again) == 5
    assert [row for row in again if not row["error"]] == [row for row in rows if not row["error"]]


def test_a_target_that_cannot_be_loaded_fails_its_cells(
    made: EvalConfig, tmp_path: Path, capsys: Any
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    configs = [dataclasses.replace(made, target=str(broken)), made]
    rows = runner.run_sweep(configs, SweepConfig())
    assert [bool(row["error"]) for row in rows] == [True, False, False]
    assert "abacus" in rows[0]["error"]


def test_answers_are_checked(made: EvalConfig) -> None:
    """One prompt has an answer; the texts are words, so a text is right only if it is that word."""
    rows = runner.run(dataclasses.replace(made, max_new_tokens=1))
    assert [row["answers_known"] for row in rows] == [1, 1]
    assert {row["accuracy"] for row in rows} <= {0.0, 1.0}
    ids = runner.open_target(made)
    answer = runner.with_requests(ids, dataclasses.replace(made, max_new_tokens=1))
    from specjax.decode.engine import Engine

    said = Engine(answer.target, answer.params["float32"]).generate(answer.requests)[1].token_ids
    assert rows[0]["accuracy"] == float(said == (7,))
