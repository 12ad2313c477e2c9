"""The door of the planner: tables, files, and mistakes in one line."""

import json
from pathlib import Path

import pytest

from specjax import cli
from specjax.core.errors import ConfigError
from specjax.plan import rewrite


def test_mesh_is_short_for_its_axes() -> None:
    words = ["--chip", "h100", "--mesh", "data=2,tensor=4", "Plan.most=1"]
    assert rewrite(words) == ["--chip", "h100", "Mesh.data=2", "Mesh.tensor=4", "Plan.most=1"]
    assert rewrite(["--mesh=expert=8"]) == ["Mesh.expert=8"]
    for wrong in ("8", "tensor", "tensr=8", "tensor=x", ""):
        with pytest.raises(ConfigError, match="--mesh"):
            rewrite(["--mesh", wrong])


def test_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan"
    words = ["--target", "qwen3-4b", "--head", "dspark", "--chip", "mi300x", "--mesh", "tensor=2"]
    small = ["--batches", "(1,)", "--contexts", "(1024,)", "Plan.most=2", "--acceptance", "0.7,0.5"]
    assert cli.main(["plan", *words, *small, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:-1])) <= 100
    for said in ("dspark_qwen3_4b_block7", "2 x mi300x", "lanes that fit", "Best:", "speedup.png"):
        assert said in printed
    record = json.loads((out / "plan.json").read_text())
    assert record["target"] == "Qwen3-4B"
    assert [row["num_speculative_tokens"] for row in record["rounds"]] == [0, 1, 2]
    draft = record["rounds"][2]["parts"]["draft"]
    assert draft["flops"] > 0 and draft["bytes"] > 0 and draft["sent"] > 0
    assert {row["batch"] for row in record["settings"]} == {1}
    assert all(row["speedup"] > 1 and row["fits"] for row in record["settings"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "kimi"], "no target 'kimi'"),
        (["--chip", "mi300"], "no chip 'mi300'"),
        (["--mesh", "tensor"], "--mesh 'tensor'"),
        (["--target", "qwen3-8b", "--head", "mtp"], "no mtp head for Qwen3-8B"),
        (["--target", "qwen3-8b", "--chip", "h100", "--mesh", "tensor=16"], "does not divide"),
        (["--acceptance", "2"], "Plan.acceptance '2'"),
        (["Plan.batches=(0,)"], "Plan.batches"),
    ],
)
def test_mistakes_take_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["plan", "--out", str(tmp_path), *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
