"""`specjax heads`: the catalogue as a table, one head as a record, mistakes in one line."""

import json
import subprocess
import sys

import pytest

from specjax import cli
from specjax.heads import catalog

TINY = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
}


def show(capsys, *words):
    """The lines that `specjax heads` prints."""
    assert cli.main(["heads", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert max(map(len, lines)) <= 100
    return lines


def rows(lines):
    """The record's rows; a value that goes on below is joined again."""
    found, title = {}, ""
    for line in lines[2:]:
        title = line[:18].strip() or title
        found.setdefault(title, []).append(line[18:].strip())
    return {title: " ".join(parts) for title, parts in found.items()}


def test_list(capsys) -> None:
    lines = show(capsys)
    starts = {line.split()[0]: line.split() for line in lines if line.strip()}
    for name in (*catalog.names(), *catalog.modules()):
        entry = catalog.read(name)
        assert name + ("*" if entry.unverified else "") in starts
        assert entry.targets[0] in starts
    eight = "151,936"
    assert starts["dflash_qwen3_8b_block7"][1:] == [
        "DFlash",
        "5",
        "7",
        "1.049",
        "/",
        "2.293",
        eight,
    ]
    assert starts["Kimi-K25-eagle3*"][1:4] == ["EAGLE-3", "1", "any"]
    assert starts["gemma-4-31B-it-speculator.dspark*"][-1] == "32,000"
    assert starts["gemma-4-E4B-it-assistant"][1:6] == ["Gemma", "4", "MTP", "4", "4"]
    assert starts["DeepSeek-V3:mtp*"][1:5] == ["Native", "MTP", "1", "any"]
    assert starts["ngram"][1:3] == ["prompt", "lookup:"]
    assert "small_model" in starts
    # Heads stand under their target.
    order = [line.split()[0] for line in lines if line.strip()]
    assert order.index("Qwen3-14B") < order.index("dspark_qwen3_14b_block7")
    assert order.index("dspark_qwen3_14b_block7") < order.index("Qwen3-30B-A3B")


def test_a_head_of_the_catalogue(capsys) -> None:
    lines = show(capsys, "Qwen3-8B-speculator.dflash")
    assert lines[0] == "Qwen3-8B-speculator.dflash"
    found = rows(lines)
    assert found["algorithm"] == "DFlash"
    assert found["made for"] == found["fits"] == "Qwen3-8B"
    assert "Qwen3-4B: it is for a target of width 4096, this one is 2560" in found["does not fit"]
    assert found["layers"] == "5 full"
    assert found["taps"] == (
        "residual streams 2, 10, 18, 26, 34 (speculators and vLLM write these), the outputs of "
        "layers 1, 9, 17, 25, 33 (DeepSpec and z-lab write these)"
    )
    assert found["block"] == "8 slots, the anchor's among them; mask token 151669"
    assert found["drafts per round"] == "7"
    assert found["confidences"] == "none"
    assert found["draft vocabulary"] == "32,000 of 151,936 tokens"
    assert found["parameters"].endswith(" stored")
    assert found["longest context"] == "40,960 tokens"
    assert found["cost per round"].startswith("7 drafts in 1 pass: ")
    assert found["state"].startswith("20,480 bytes per token, 4 bytes per row")
    assert "copy of the released config.json" in found["source"]
    assert "published" not in found and "reads" not in found


def test_published_sizes_and_unverified_facts(capsys) -> None:
    found = rows(show(capsys, "gemma-4-26B-A4B-it-speculator.eagle3", "gemma-4-26B-A4B-it"))
    assert found["published"] == "1,855,768,160 bytes"
    assert found["not verified"].startswith("eagle_aux_hidden_state_layer_ids: ")
    assert found["cost per round"].startswith("3 drafts in 3 passes: ")
    assert found["longest context"] == "not stated"
    assert "does not fit" not in found  # just the one target was tried
    found = rows(show(capsys, "Kimi-K2.5-DFlash", "Kimi-K2.5"))
    assert found["published"] == "6.48 GiB"
    found = rows(show(capsys, "dspark_qwen3_4b_block7", "Qwen3-4B"))
    assert found["published"] == "1.39 billion parameters"
    assert found["confidences"] == "of its own"


def test_a_head_that_reads_the_target(capsys) -> None:
    found = rows(show(capsys, "gemma-4-31B-it-assistant", "gemma-4-31B-it"))
    assert found["reads"] == "keys and values of the target's layers 58, 59"
    assert "taps" not in found
    assert "block" not in found


@pytest.mark.parametrize("word", ["ngram", "small_model", "small_model:DIR"])
def test_plain_drafters(word, capsys) -> None:
    (line,) = show(capsys, word)
    assert line.startswith(f"{word}: ")


def test_directory(tmp_path, capsys) -> None:
    for name, config in (
        ("target", TINY),
        ("head", {**TINY, "architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 1,
                  "target_layer_ids": [0, 2]}),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    head = str(tmp_path / "head")
    found = rows(show(capsys, head, str(tmp_path / "target")))
    assert found["fits"] == "target"
    assert found["taps"].startswith("residual streams 1, 3 ")
    assert found["drafts per round"] == "any"
    assert "made for" not in found
    assert cli.main(["heads", head]) == 2
    captured = capsys.readouterr()
    assert "fits no target of the catalogue" in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Qwen3-8B-DFlash"], "no head 'Qwen3-8B-DFlash': neither a directory nor in the catalogue;"
         " did you mean 'Qwen3-8B-DFlash-b16'?"),
        (["Qwen3-8B-DFlash-b16", "Qwen3-4B"],
         "Qwen3-8B-DFlash-b16 is for a target of width 4096, this one is 2560"),
        (["Qwen3-8B-DFlash-b16", "Qwen"], "no target 'Qwen' in the catalogue"),
        (["."], "config.json does not exist"),
        (["a", "b", "c"], "specjax heads takes a head and a target, not 3 words"),
        (["--list"], "unknown flag --list"),
    ],
)  # fmt: skip
def test_mistakes(words, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["heads", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from specjax import cli
assert cli.main(["heads", "--help"]) == 0
heavy = {"jax", "flax", "torch", "transformers", "datasets", "matplotlib"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: specjax heads" in done.stdout


def test_it_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specjax.show_heads", "--x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("specjax: error: unknown flag --x")
