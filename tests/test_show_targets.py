"""`specjax targets`: the catalogue as a table, one target as a record, mistakes in one line."""

import json
import subprocess
import sys

import pytest

from specjax import cli, show_targets
from specjax.targets import catalog

TINY = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def show(capsys, *words):
    """The lines that `specjax targets` prints."""
    assert cli.main(["targets", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert max(map(len, lines)) <= 100
    return lines


def rows(lines):
    """The record's rows; a value that goes on below is joined again."""
    found, title = {}, ""
    for line in lines[2:]:
        title = line[:17].strip() or title
        found.setdefault(title, []).append(line[17:].strip())
    return {title: " ".join(parts) for title, parts in found.items()}


def test_list(capsys) -> None:
    lines = show(capsys)
    starts = {line.split()[0]: line for line in lines if line.strip()}
    for name in catalog.names():
        mark = "*" if catalog.read(name).unverified else ""
        assert starts[name + mark].startswith(name)
    assert starts["Qwen3-8B"].split() == ["Qwen3-8B", "qwen3", "36", "full", "8.191", "144.0"]
    assert starts["Kimi-K2.5*"].split()[-3:] == ["1026.408", "(32.862)", "68.6"]


def test_a_target_of_the_catalogue(capsys) -> None:
    lines = show(capsys, "gemma-4-31B-it")
    assert lines[0] == "gemma-4-31B-it"
    found = rows(lines)
    assert found["layers"] == "60: 10 full, 50 sliding-window 1024"
    assert found["parameters"] == "30,697,345,340, text model"
    assert found["growing cache"] == "81,920 bytes per token, in bfloat16"
    assert found["fixed cache"].startswith("838,860,800 bytes per row")
    assert found["longest context"] == "262,144 tokens, 20.78 GiB per row"
    assert found["stop ids"] == "1, 50, 106"
    assert found["taps"].startswith("0 to 60: 0 is the embedding output")
    assert "Native MTP (the checkpoint holds no MTP module)" in found["do not fit"]
    assert "not verified" not in found


def test_experts_and_unverified_facts(capsys) -> None:
    found = rows(show(capsys, "MiniMax-M2.5"))
    assert found["layers"] == "62 full"
    assert found["experts"] == "8 of 256 per token, in 62 layers"
    assert found["parameters"] == "228,689,764,864 (11,030,553,088 active), text model"
    assert found["published"].startswith(
        "230 (counted 228.690, -0.6%), 10 active (counted 11.031, +10.3%) billion. "
    )
    assert found["storage"] == "fp8 in blocks of 128 x 128, packed"
    assert found["not verified"].startswith("bos_token_id, eos_token_id: ")


def test_heads_that_exist_are_told_from_those_to_come(capsys, monkeypatch) -> None:
    assert show_targets.is_built("eagle3")
    assert not show_targets.is_built("nothing")
    monkeypatch.setattr(show_targets, "is_built", lambda name: name in ("eagle3", "gemma4_mtp"))
    found = rows(show(capsys, "gemma-4-E2B-it"))
    assert found["drafters"] == "EAGLE-3, Gemma 4 MTP"
    assert found["not built yet"] == "DFlash, DSpark, prompt lookup, small model"
    found = rows(show(capsys, "Qwen3.5-4B"))
    assert found["drafters"] == "EAGLE-3"
    assert found["not built yet"].endswith(", Native MTP")
    assert found["do not fit"] == "Gemma 4 MTP (made for Gemma 4)"


def test_directory(tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    lines = show(capsys, str(tmp_path))
    assert lines[0] == tmp_path.name
    found = rows(lines)
    assert found["family"] == "llama"
    assert found["stop ids"] == "none"
    assert found["skipped tensors"] == "unknown, no weights here"
    assert "published" not in found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gemma-4-31B"], "no target 'gemma-4-31B': neither a directory nor in the catalogue; "
         "did you mean 'gemma-4-31B-it'?"),
        (["."], "config.json does not exist"),
        (["a", "b"], "specjax targets takes one name or directory, not 2"),
        (["--list"], "unknown flag --list"),
    ],
)  # fmt: skip
def test_mistakes(words, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["targets", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from specjax import cli
assert cli.main(["targets", "--help"]) == 0
heavy = {"jax", "flax", "torch", "transformers", "datasets", "matplotlib"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: specjax targets" in done.stdout


def test_it_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specjax.show_targets", "--x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("specjax: error: unknown flag --x")
