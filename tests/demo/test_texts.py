"""Answers in the form that the demonstration target learns, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.demo import heads, texts
from scripts.demo import tokenizer as bpe
from specjax.core.errors import DataError, TrainingError
from specjax.data.chat import ChatEncoder

BOX = "The final answer is \\boxed{%s}."


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("She has 5 + 7 = 12 eggs.", f"She has 5 + 7 = 12 eggs.\n\n{BOX % '12'}"),
        # A closing line of its own gives way to the box.
        ("He ran 3 miles.\n\nSo, the final answer is $3.50.", f"He ran 3 miles.\n\n{BOX % '3.50'}"),
        ("The answer is 4.", f"The answer is 4.\n\n{BOX % '4'}"),
        ("It costs 1,200 dollars, or -3.", f"It costs 1,200 dollars, or -3.\n\n{BOX % '-3'}"),
        ("In all 1,200, she says.", f"In all 1,200, she says.\n\n{BOX % '1,200'}"),
        ("First 8.\nThe answer is within \\boxed{}.", None),
        ("Add 2. Add 2. Add 2. So 6.", None),
        ("", None),
    ],
)
def test_trained_form(answer: str, expected: str | None) -> None:
    assert texts.trained_form(answer) == expected
    if expected is not None:
        assert texts.in_form(expected)
        assert not texts.in_form(answer)


def answer(index: int, said: str, reason: str = "stop") -> dict[str, Any]:
    messages = [{"role": "user", "content": f"q{index}"}, {"role": "assistant", "content": said}]
    return {"messages": messages, "prompt_index": index, "finish_reason": reason}


def test_held_out_prompts_are_never_trained_on() -> None:
    prompts = texts.HELD_OUT + 4
    rows = [answer(i, f"It is {i}.") for i in reversed(range(prompts))]
    rows[-1] = answer(0, "It is 0.", "length")
    rows[-2] = answer(1, "Who knows?")
    kept = list(texts.trained_chats(rows, prompts))
    assert [row["prompt_index"] for row in kept] == [2, 3]
    assert all(texts.in_form(row["messages"][1]["content"]) for row in kept)
    assert texts.SHIPPED <= texts.HELD_OUT


def test_share_in_form(tmp_path: Path) -> None:
    boxed = f"So 3. {BOX % '3'}"
    rows = [answer(0, boxed), answer(1, boxed, "length"), answer(2, "So 3."), answer(3, boxed)]
    path = tmp_path / "answers.jsonl"
    assert texts.write_rows(rows, path) == 4
    assert texts.read_rows(path) == rows
    assert heads.share_in_form(path) == 0.5


def test_rows_keep_unicode_line_separators(tmp_path: Path) -> None:
    texts.write_rows([answer(0, "a\u2028b"), answer(1, "c")], tmp_path / "x.jsonl")
    assert len(texts.read_rows(tmp_path / "x.jsonl")) == 2


def test_bad_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with pytest.raises(DataError, match=r"no file .*answers\.jsonl"):
        texts.read_rows(path)
    path.write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(DataError, match=r"answers\.jsonl:2 is not a JSON object"):
        texts.read_rows(path)


def test_a_failing_script_ends_the_run() -> None:
    with pytest.raises(TrainingError, match=r"regenerate\.py --no-such-option ended with 2"):
        heads.run(["scripts/regenerate.py", "--no-such-option"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("bpe")
    bpe.train(["Weng earns $12 an hour. She worked 50 minutes."] * 4, folder)
    return AutoTokenizer.from_pretrained(folder)


def test_tokenizer_gives_texts_back(tokenizer: Any) -> None:
    for text in ("Weng earns $1,234.50.\n\nÄh… \\boxed{7}.", " two  blanks ", "1. So, 20% of 30"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    digits = tokenizer.convert_ids_to_tokens(tokenizer("120", add_special_tokens=False).input_ids)
    assert digits == ["1", "2", "0"]


def test_tokenizer_knows_its_special_tokens(tokenizer: Any) -> None:
    assert tokenizer.convert_tokens_to_ids(list(bpe.SPECIAL)) == [0, 1, 2, 3, 4, 5]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert tokenizer.mask_token_id == 3
    assert bpe.STOP_IDS == (1, 5)


def test_answers_are_supervised_with_their_stop(tokenizer: Any) -> None:
    messages = answer(0, "So 6.")["messages"]
    encoded = ChatEncoder(tokenizer, bpe.STOP_IDS).encode(messages)
    assert tokenizer.decode(encoded.ids[encoded.mask]) == "So 6.<turn|>"
    text = tokenizer.decode(encoded.ids)
    assert text == "<bos><|turn>user\nq0<turn|>\n<|turn>model\nSo 6.<turn|>\n"
    prompt = ChatEncoder(tokenizer, bpe.STOP_IDS).prompt_ids(messages[:1])
    assert encoded.ids[: len(prompt)].tolist() == prompt
