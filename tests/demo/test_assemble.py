"""The model card, from the logs of small made-up runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.demo import assemble, target, texts
from specjax.core.errors import DataError
from specjax.demo import HEADS, TARGET
from specjax.io.hf import write_json

QUESTION = "How many?" + assemble.SUFFIX


def said(index: int, reason: str = "stop") -> dict[str, Any]:
    text = f"It is {index}.\n\nThe final answer is \\boxed{{{index}}}."
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": text}]
    return {
        "messages": messages,
        "prompt_index": index,
        "finish_reason": reason,
        "num_tokens": 10,
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    heldout = {"heldout_loss": 1.5, "heldout_answer_loss": 1.25, "heldout_answer_accuracy": 0.625}
    log = [{"step": 1, "tokens": 600}, {"step": 2, "tokens": 634, **heldout}]
    texts.write_rows(log, tmp_path / "target_run" / "train.jsonl")
    texts.write_rows([said(i) for i in range(3)], tmp_path / "chats.jsonl")
    texts.write_rows([said(i) for i in range(5)], tmp_path / "answers.jsonl")
    order = [3, 0, *range(4, 20), 1, 2]  # answers are written as they end
    cut = [said(i, "length" if i in (0, 19) else "stop") for i in order]
    texts.write_rows(cut, tmp_path / "heldout_answers.jsonl")
    texts.write_rows([{"turns": ["How many?"]}] * 30, tmp_path / "prompts.jsonl")
    for name in HEADS:
        points = [1.5, None, 2.25]
        rows = [{"tokens": 2000, "decoded_mean_acceptance_length": p} for p in points]
        kept = [{k: v for k, v in row.items() if v is not None} for row in rows]
        texts.write_rows(kept, tmp_path / "heads" / name / "train.jsonl")
    row = {
        "head": "dflash",
        "error": None,
        "num_speculative_tokens": 4,
        "mean_acceptance_length": 3.125,
        "speedup": 1.5,
        "speedup_same_dtype": 1.25,
        "identical": 16,
        "prompts": 16,
        "machine": {"cores": 2, "gpu": None},
    }
    texts.write_rows([{**row, "head": "none"}, row], tmp_path / "results.jsonl")
    write_json(target.CONFIG, tmp_path / "demo" / TARGET / "config.json")
    return tmp_path


def test_the_card_says_what_was_measured(runs: Path) -> None:
    out = runs / "demo"
    assemble.card(runs, runs / "prompts.jsonl", out, runs / "results.jsonl")
    card = (out / "README.md").read_text()
    assert "2 steps, 1,234\n  tokens" in card
    assert "loss 1.500, on answers 1.250" in card and "right in 62.5%" in card
    assert "**90% of its greedy answers" in card
    assert "5 training\n  prompts (50 tokens)" in card
    assert "| dflash | 4 | 3.12 | 1.50 | 1.25 | 16/16 |" in card
    assert "Machine: cores 2." in card
    assert "- eagle3: 1.50 at 2k, 2.25 at 6k" in card
    # Ten samples, of the sixteen prompts that ship, in their order.
    assert card.count("```text") == 10
    assert "It is 4." in card and "It is 13." in card
    assert "It is 3." not in card and "It is 14." not in card
    assert '"How many?"' in card  # without what every prompt ends with


def test_too_large_a_package_is_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "LIMIT", 1000)
    with pytest.raises(DataError, match="more than 1,000"):
        assemble.card(runs, runs / "prompts.jsonl", runs / "demo", runs / "results.jsonl")
