"""The whole command: files written, texts compared, mistakes told in one line."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from specjax import eval as door
from specjax import heads, targets
from specjax.core.params import init_params
from specjax.evaluation import measure, records, runner
from specjax.heads.base import borrow
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from tests.evaluation.known import CONFIG


def test_a_run_writes_everything(recorded: Any, tmp_path: Path, capsys: Any) -> None:
    rows = recorded(time_shares=False)
    assert [row["head"] for row in records.read(tmp_path)] == [r["head"] for r in rows]
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.jsonl",
        "report.md",
        "report.html",
        "figures",
        "config.gin",
    }
    assert (tmp_path / "config.gin").read_text() == "# settings"
    assert (tmp_path / "figures" / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "a note" in printed
    assert "4/4" in printed


def test_a_wrong_text_is_reported(recorded: Any, monkeypatch: Any, capsys: Any) -> None:
    """F62: a difference beyond rounding is never passed over."""
    original = runner.run_alternating

    def spoilt(*args: Any) -> Any:
        measured = original(*args)
        for each in measured[-1].passes:
            first = each.results[0]
            wrong = (*first.token_ids[:-1], (first.token_ids[-1] + 1) % 61)
            each.results[0] = dataclasses.replace(first, token_ids=wrong)
        return measured

    monkeypatch.setattr(runner, "run_alternating", spoilt)
    row = recorded(time_shares=False)[1]
    assert row["identical"] == 3
    assert row["differing"] == 1
    assert row["near_ties"] == 0
    assert row["differences"][0]["position"] == 12
    assert "NOT LOSSLESS" in capsys.readouterr().out


def test_sampled_texts_are_not_compared(recorded: Any, subject: Any) -> None:
    row = recorded(time_shares=False, temperature=1.0, repeats=1)[1]
    assert row["identical"] is None
    assert row["differences"] is None
    assert row["speedup"] > 0


def call(argv: list[str], capsys: Any) -> str:
    """Run `specjax eval` and return its one line of error, "" where it went well."""
    code = door.main([*argv, "Eval.repeats=1"])
    error = capsys.readouterr().err.strip()
    assert code == (2 if error else 0)
    assert "\n" not in error
    return error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("", "is empty"),
        ('{"question": "w3"}', "prompts.jsonl:1: expected .turns."),
        (
            '{"turns": ["w3"]}\n{"turns": ["' + "w3 " * 120 + '"]}',
            "prompts.jsonl:2: a prompt of 121 .* the target's longest context of 128",
        ),
    ],
)
def test_bad_prompts(
    checkpoint: Path, tmp_path: Path, capsys: Any, content: str | None, words: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    if content is not None:
        prompts.write_text(content)
    argv = ["--target", str(checkpoint), "--head", "none", "--prompts", str(prompts)]
    error = call([*argv, "--out", str(tmp_path / "out"), "Eval.max_new_tokens=16"], capsys)
    assert re.search(words, error), error
    assert not (tmp_path / "out").exists()  # nothing half-written


def test_missing_head_and_unwritable_out(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["w3"]}')
    argv = ["--target", str(checkpoint), "--prompts", str(prompts), "Eval.max_new_tokens=16"]
    out = ["--out", str(tmp_path / "out")]
    assert "missing" in call([*argv, "--head", "missing", *out], capsys)
    assert "no MTP modules" in call([*argv, "--head", "mtp", *out], capsys)
    many = [*argv, "--head", "ngram", *out, "Eval.num_speculative_tokens=4000"]
    assert "has 64 positions in all" in call(many, capsys)
    assert not (tmp_path / "out").exists()
    out = ["--out", str(prompts / "below-a-file")]
    assert "cannot be made" in call([*argv, "--head", "none", *out], capsys)


def test_baseline_alone_from_files(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["w3 w4", "w5"]}\n{"turns": ["w6"]}\n{"turns": ["w7"]}')
    argv = ["--target", str(checkpoint), "--head", "none", "--prompts", str(prompts)]
    argv += ["--out", str(tmp_path / "out"), "Eval.max_new_tokens=4", "Eval.num_prompts=2"]
    assert call([*argv, "Eval.enable_thinking=True"], capsys) == ""
    (row,) = records.read(tmp_path / "out")
    assert (row["head"], row["prompts"], row["requests"]) == ("none", 2, 3)
    assert row["target"] == checkpoint.name
    assert row["notes"] == [
        "Prompts were rendered with the target's own chat template, enable_thinking=True.",
        "Later turns are asked after the answers that the target gave without a head, the same in"
        " every run.",
    ]
    assert row["identical"] == 2
    assert json.dumps(row, allow_nan=False)
    assert "Eval.num_prompts = 2" in (tmp_path / "out" / "config.gin").read_text()


def test_a_head_for_another_target_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line before anything runs; nothing is written. So, too, with more drafts than it has."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["w3"]}')
    for name, wider in (("fits", 1), ("other", 2)):
        config = {**CONFIG, "hidden_size": wider * CONFIG["hidden_size"]}
        target = targets.from_config(config)
        params = init_params(target.specs(), jax.random.key(0))
        settings = DFlashConfig(taps=(0,), block_size=4, mask_token_id=5, layers=1)
        head = DFlashHead.for_target(target.info, settings)
        weights = head.init(jax.random.key(0), borrow(target, params))
        heads.save(head, weights, tmp_path / name)
    argv = ["--target", str(checkpoint), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    argv += ["Eval.max_new_tokens=16"]
    monkeypatch.setattr(measure, "_run", None)  # nothing may run
    assert "is for a target of width 32" in call([*argv, "--head", str(tmp_path / "other")], capsys)
    argv += ["--head", str(tmp_path / "fits"), "Eval.num_speculative_tokens=9"]
    assert "drafts at most 3" in call(argv, capsys)
    assert not (tmp_path / "out").exists()
