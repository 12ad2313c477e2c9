"""The formats of the field give the same messages; what is malformed is counted by reason."""

import json

import pytest

from specjax.core.errors import DataError
from specjax.data.chat import ChatEncoder
from specjax.data.conversations import conversation_of, load_chats
from specjax.data.sources import RowError
from tests.data.templates import CHATML

EXPECTED = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
]
SPOKEN = [("system", "s"), ("human", "q"), ("gpt", "a")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": EXPECTED},
        {"conversations": EXPECTED},
        {"conversations": [{"from": who, "value": what} for who, what in SPOKEN]},
        {"turns": ["q"], "responses": ["a"], "system": "s"},
        {"turns": ["q"], "responses": "a", "system": "s"},
        {"prompt": "q", "response": "a", "system": "s"},
        {"prompt": "q", "completion": "a", "system": "s"},
        {"prompt": EXPECTED[:2], "completion": EXPECTED[2:]},
        {
            "messages": [
                *EXPECTED[:2],
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            ]
        },
    ],
)
def test_every_format_gives_the_same_messages(row):
    assert conversation_of(row, "here") == EXPECTED


def test_the_row_says_that_its_answer_was_cut():
    row = {"prompt": "q", "response": "a", "finish_reason": "length"}
    assert conversation_of(row, "here")[-1]["finish_reason"] == "length"


BAD = [
    ({"text": "x"}, "unknown format"),
    ({"turns": ["q"]}, "prompt without an answer"),
    ({"prompt": "q"}, "prompt without an answer"),
    ({"turns": ["q", "r"], "responses": ["a"]}, "fields of the wrong kind"),
    ({"turns": 3, "responses": ["a"]}, "fields of the wrong kind"),
    ({"conversations": "x"}, "fields of the wrong kind"),
    ({"conversations": [{"from": "nobody", "value": "x"}]}, "unknown role"),
    ({"conversations": [{"from": ["human"], "value": "x"}]}, "unknown role"),
    ({"conversations": [{"from": "human"}]}, "message without text"),
    ({"messages": [{"role": "user", "content": 3}]}, "message without text"),
    ({"messages": ["x"]}, "unknown role"),
    ({"messages": EXPECTED, "tools": ["f"]}, "fields of the wrong kind"),
]


def test_malformed_rows_are_counted_by_reason_or_refused(tmp_path, make_tokenizer):
    """Issue 5: counted and reported with their places, never trained on."""
    encoder = ChatEncoder(make_tokenizer(CHATML, "<|im_end|>"))
    path = tmp_path / "x.jsonl"
    lines = ["{torn", *(json.dumps(row) for row, _ in BAD), json.dumps({"messages": EXPECTED})]
    path.write_text("\n".join(lines) + "\n")
    rows, counts = load_chats([path], encoder)
    assert len(rows) == counts.used == 1
    reasons = ["not JSON in UTF-8", *(reason for _, reason in BAD)]
    assert counts.malformed == {reason: reasons.count(reason) for reason in reasons}
    assert len(counts.places) == sum(min(n, 3) for n in counts.malformed.values())
    assert all(place.startswith(f"{path}:") for place in counts.places)
    for number, (row, reason) in enumerate(BAD, 2):
        path.write_text("\n" * (number - 1) + json.dumps(row) + "\n")
        with pytest.raises(RowError, match=rf"x\.jsonl:{number}: ") as raised:
            load_chats([path], encoder, strict=True)
        assert raised.value.reason == reason


def test_a_source_without_a_usable_row_is_an_error_even_beside_a_good_one(tmp_path, make_tokenizer):
    encoder = ChatEncoder(make_tokenizer(CHATML, "<|im_end|>"))
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(json.dumps({"messages": EXPECTED}) + "\n")
    bad.write_text('{"text": "x"}\n{"messages": []}\n')
    match = r"no row of .*bad\.jsonl can be trained on: 1 empty, 1 malformed \(unknown format\); "
    with pytest.raises(DataError, match=match + r"first: .*bad\.jsonl:1: expected"):
        load_chats([good, bad], encoder)
