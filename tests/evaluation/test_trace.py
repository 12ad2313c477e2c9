"""Traces: the measured text, and every token's origin accounted for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specjax.decode.requests import Result
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.html import trace_page
from specjax.evaluation.measure import make_engine, speculative
from specjax.evaluation.records import Record
from specjax.evaluation.subject import Subject
from specjax.evaluation.trace import pieces, trace
from tests.evaluation.test_html import Outline


def words(ids: Any) -> str:
    return " ".join(f"w{i}" for i in ids)


@pytest.fixture(scope="module")
def traced(subject: Subject, config: EvalConfig) -> tuple[list[Result], list[dict[str, Any]]]:
    engine = make_engine(subject, speculative(config, subject))
    requests = subject.requests[:3]  # more than there are lanes, and the last batch is not full
    results = engine.generate(requests)
    return results, trace(engine, requests, results, words)


def test_the_trace_is_the_measured_text(traced: Any) -> None:
    results, texts = traced
    for result, text in zip(results, texts, strict=True):
        assert text["same_text"]
        emitted = "".join(piece for each in text["rounds"] for piece in each["emitted"])
        assert emitted.split() == words(result.token_ids).split()
        first, *rounds = text["rounds"]
        assert len(first["emitted"]) == 1 and not first["drafts"]
        assert len(rounds) == result.rounds
        assert sum(each["accepted"] for each in rounds) == sum(result.accepted)
        assert sum(each["verified"] for each in rounds) == sum(result.drafted)
        # 2 of 3 drafts of the known head are right, and the third never is.
        assert rounds[0]["accepted"] == 2 and rounds[0]["drafts"][:2] == rounds[0]["emitted"][:2]
        assert rounds[0]["drafts"][2] != rounds[0]["emitted"][2]


def test_another_text_is_told(subject: Subject, config: EvalConfig, traced: Any) -> None:
    results, _ = traced
    other = dataclasses.replace(results[0], token_ids=(*results[0].token_ids[:-1], 1))
    engine = make_engine(subject, speculative(config, subject))
    (text,) = trace(engine, subject.requests[:1], [other], None)
    assert not text["same_text"]


def test_the_page(rows: list[Record], traced: Any) -> None:
    _, texts = traced
    sure = [{**each, "confidence": [0.25] * len(each["drafts"])} for each in texts[0]["rounds"]]
    row = rows[1] | {"trace": [texts[1], {**texts[0], "rounds": sure, "same_text": False}]}
    (run,) = trace_page.pages([rows[0], row, rows[1]])
    assert run["texts"][0]["length"] == "3.00"
    page = trace_page.render([run])
    outline = Outline(page)
    assert outline.loads == ["data:,"]
    assert page.count('class="t draft"') and page.count('class="t draft sure"')
    assert "behind a rejected one" not in page and "rejected, 25 % sure" in page
    assert page.count("not the text of the measured run") == 1
    assert trace_page.pages(rows) == []


def test_kinds_of_tokens() -> None:
    whole = {"emitted": ["a", "b", "c"], "drafts": ["a", "b"], "verified": 2, "accepted": 2}
    half = {"emitted": ["a", "x"], "drafts": ["a", "b", "c"], "verified": 2, "accepted": 1}
    none = {"emitted": ["x"], "drafts": ["a"], "verified": 0, "accepted": 0}
    ended = {"emitted": ["a"], "drafts": ["a", "b"], "verified": 1, "accepted": 1}
    kinds = [
        [token["kind"] for token in trace_page._round({**each, "confidence": None})["tokens"]]
        for each in (whole, half, none, ended)
    ]
    assert kinds == [["draft", "draft", "bonus"], ["draft", "correction"], ["target"], ["draft"]]
    fates = [d["fate"] for d in trace_page._round({**half, "confidence": None})["drafts"]]
    assert fates == ["accepted", "rejected", "not verified"]


def test_pieces_of_characters_in_several_tokens() -> None:
    """A byte a token; a token that adds no text shows its id."""
    text = "aé\n".encode()

    def decode(ids: Any) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    assert pieces([], [*text, 300], decode) == ["a", "\ufffd", "é", "\n", "⟨300⟩"]
    assert pieces(text[:2], text[2:3], decode) == ["é"]
