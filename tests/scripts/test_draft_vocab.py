"""scripts/draft_vocab.py from chat files to a released-form file."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scripts.draft_vocab import main

WORDS = ["<end>", "user", "assistant", "a", "b", "c", "d", "e"]


@pytest.fixture
def target(tmp_path):
    """A directory with a word tokenizer, 12 target ids and two stop ids."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="e"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 12, "model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 11]}))
    return tmp_path


def write(path, *pairs):
    """A chat file of (question, answer) rows."""
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_counts_answers_and_keeps_stops(target, capsys):
    """Questions do not count; the unseen stop id 11 is kept; coverage is reported."""
    data = write(target / "d.jsonl", ("a a a a a", "b b c"), ("a", "c b d"))
    output = target / "v.safetensors"
    arguments = ["--target", str(target), "--data", str(data), "--output", str(output)]
    assert main([*arguments, "--size", "4"]) == 0
    read = load_file(output)
    kept = [4, 5]  # b, c
    assert (np.arange(4) + read["d2t"]).tolist() == [0, *kept, 11]
    assert np.flatnonzero(read["t2d"]).tolist() == [0, *kept, 11] and len(read["t2d"]) == 12
    assert "cover 87.50% of 8 answer tokens (4 distinct) in 2 rows" in capsys.readouterr().out


def test_mistakes_are_one_line(target, capsys):
    """Exit code 2, nothing written."""
    data = write(target / "d.jsonl", ("a", "b"))
    output = target / "v.safetensors"
    arguments = ["--target", str(target), "--data", str(data), "--output", str(output)]
    for extra, message in [
        (["--size", "13"], "13 is not within the target's 1 to 12"),
        (["--target", str(target / "none")], "none"),
        (["--data", str(target / "none.jsonl")], "no such file"),
    ]:
        assert main([*arguments, *extra]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not output.exists()
