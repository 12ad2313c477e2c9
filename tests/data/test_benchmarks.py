"""Benchmarks by name: rows of each become the prompts of published evaluations."""

import json
from pathlib import Path
from typing import Any

import pytest

from specjax.core.errors import DataError
from specjax.data import prompts, sources
from specjax.data.benchmarks import BENCHMARKS

ROWS: dict[str, Any] = {
    "gsm8k": {"question": "How many?", "answer": "3 + 4 = 7\n#### 7"},
    "math500": {"problem": "Find $x$.", "answer": "\\frac{1}{2}", "level": 3},
    "humaneval": {"prompt": "def f():\n", "task_id": "HumanEval/0"},
    "mbpp": {"prompt": "Write f.", "code": "def f(): ..."},
    "mt-bench": {"prompt": ["Compose.", "Rewrite."], "category": "writing"},
}
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
TURNS = {
    "gsm8k": (f"How many?\n{BOXED}",),
    "math500": (f"Find $x$.\n{BOXED}",),
    "humaneval": (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f():\n\n```",
    ),
    "mbpp": ("Write f.",),
    "mt-bench": ("Compose.", "Rewrite."),
}
ANSWERS = {"gsm8k": " 7", "math500": "\\frac{1}{2}"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_become_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_from_hub", lambda source: [ROWS[name]] * 3)
    found = prompts.load_prompts(name, limit=2)
    assert [p.turns for p in found] == [TURNS[name]] * 2
    assert found[0].answer == ANSWERS.get(name)
    assert found[1].source == f"{BENCHMARKS[name].source}, row 2"


def test_a_row_of_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_from_hub", lambda source: [{"text": "x"}])
    with pytest.raises(DataError, match=r"gsm8k.*row 1: not a row of this benchmark .*\['text'\]"):
        prompts.load_prompts("gsm8k")


def test_without_a_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"Couldn't reach the hub\. Without a connection"):
        prompts.load_prompts("mt-bench")


def test_a_file_of_such_a_name_has_its_folder(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "gsm8k").write_text(json.dumps({"prompt": "x", "answer": 3}))
    monkeypatch.chdir(tmp_path)
    (found,) = prompts.load_prompts("./gsm8k")
    assert (found.turns, found.answer) == (("x",), "3")
