"""Prompt files: the three forms, and each mistake named by file and line."""

import json

import pytest

from specjax.core.errors import DataError
from specjax.data.prompts import Prompt, load_prompts, messages_of, read_json_lines


def write(path, *rows):
    """A JSON lines file; text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_three_forms(tmp_path):
    """`turns`, `messages` (its answers dropped) and `prompt`; blank lines do not count."""
    messages = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "gone"},
        {"role": "user", "content": "b"},
    ]
    path = write(
        tmp_path / "p.jsonl", {"turns": ["x é", "y"]}, "", {"messages": messages}, {"prompt": "z"}
    )
    assert load_prompts(path, suffix="!") == [
        Prompt(("x é!", "y!"), None, f"{path}:1"),
        Prompt(("a!", "b!"), "brief", f"{path}:3"),
        Prompt(("z!",), None, f"{path}:4"),
    ]
    assert len(load_prompts(path, limit=2)) == 2
    assert load_prompts(path)[1].opening() == messages[:2]
    said = [messages[1], {"role": "assistant", "content": "own"}, messages[3]]
    assert load_prompts(path)[1].messages(["own"]) == [messages[0], *said]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "expected \"turns\".*found keys \\['question'\\]"),
        ({"turns": []}, "at least one user message"),
        ({"turns": "x"}, "at least one user message"),
        ({"turns": ["x", " "]}, "user message 1 is not text or is empty"),
        ({"turns": [3]}, "user message 0 is not text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "at least one user message"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "message 0 has role 'usr'"),
        ({"messages": [{"role": "user"}]}, "message 0 \\(user\\) has no text"),
        ({"messages": "x"}, 'expected a list "messages"'),
        ({"turns": ["x"], "answer": [1]}, '"answer" is neither text nor a number'),
        ("[1]", "expected a JSON object, found list"),
        ('{"turns": ["x"]', "not a line of JSON"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, row, message):
    """One clear line each."""
    path = write(tmp_path / "p.jsonl", {"turns": ["fine"]}, row)
    with pytest.raises(DataError, match=f"p.jsonl:2: .*{message}") as raised:
        load_prompts(path)
    assert "\n" not in str(raised.value)


def test_files_without_rows(tmp_path):
    """Missing, empty, not UTF-8."""
    with pytest.raises(DataError, match="no such file"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is empty"):
        load_prompts(write(tmp_path / "p.jsonl", "", " "))
    (tmp_path / "bad.jsonl").write_bytes(b'{"turns": ["\xff"]}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1: .*UTF-8"):
        list(read_json_lines(tmp_path / "bad.jsonl"))


def test_tool_calls_need_no_content():
    """An assistant message may hold calls alone."""
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}
    assert messages_of(row, "here") == row["messages"]
