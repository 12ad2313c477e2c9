"""Conversations of several turns: what stands in the prompt of the second."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from specjax.core.errors import DataError
from specjax.data.prompts import Prompt
from specjax.decode.engine import Engine
from specjax.evaluation import subject, turns
from specjax.evaluation.config import EvalConfig

PROMPTS = [
    Prompt(("w3 w4", "w5 w6"), "w9", "p:1", "w7"),
    Prompt(("w8",), None, "p:2", "w1"),
    Prompt(("w4", "w5", "w6"), None, "p:3"),
]


@pytest.fixture(scope="module")
def opened(checkpoint: Path) -> subject.Opened:
    return subject.open_target(config(checkpoint))


def config(checkpoint: Path, **changes: Any) -> EvalConfig:
    given: dict[str, Any] = {"baseline_dtypes": ("float32",), "max_new_tokens": 3} | changes
    return EvalConfig(str(checkpoint), "none", "p", **given)


def ask(opened: subject.Opened, settings: EvalConfig, prompts: list[Prompt]) -> turns.Asked:
    return turns.ask(opened.target, opened.params["float32"], opened.tokenizer, prompts, settings)


def said(opened: subject.Opened, request: Any) -> tuple[int, ...]:
    engine = Engine(opened.target, opened.params["float32"])
    return engine.generate([request])[0].token_ids


def test_answers_go_into_the_next_prompt(opened: subject.Opened, checkpoint: Path) -> None:
    """The template writes all messages one after the other, and w2 to have them answered."""
    asked = ask(opened, config(checkpoint), PROMPTS)
    assert asked.prompt_of == (0, 1, 2, 0, 2, 2)
    assert asked.answers == (None, "w1", None, "w7", None, None)
    first = [r.prompt_ids for r in asked.requests[:3]]
    assert first == [(9, 3, 4, 2), (8, 2), (4, 2)]
    answers = [said(opened, request) for request in asked.requests]
    assert asked.requests[3].prompt_ids == (9, 3, 4, *answers[0], 5, 6, 2)
    assert asked.requests[4].prompt_ids == (4, *answers[2], 5, 2)
    assert asked.requests[5].prompt_ids == (4, *answers[2], 5, *answers[4], 6, 2)
    assert [r.seed for r in asked.requests] == list(range(6))


def test_the_same_requests_whoever_asks(opened: subject.Opened, checkpoint: Path) -> None:
    """Sampled answers in between depend on the seed alone, not on lanes or on what drafts."""
    warm = config(checkpoint, temperature=1.0, seed=5)
    engine = dataclasses.replace(warm.engine, verification="budget", argmax_confidence=True)
    other = dataclasses.replace(
        warm, concurrency=2, num_speculative_tokens=2, head="ngram", engine=engine
    )
    assert ask(opened, warm, PROMPTS) == ask(opened, other, PROMPTS)
    colder = dataclasses.replace(warm, seed=6)
    assert ask(opened, colder, PROMPTS).requests[3] != ask(opened, warm, PROMPTS).requests[3]


def test_without_a_template_text_is_continued(opened: subject.Opened, checkpoint: Path) -> None:
    asked = ask(opened, config(checkpoint, chat_template=False), PROMPTS[:1])
    first = asked.requests[0]
    assert first.prompt_ids == (3, 4)
    assert asked.requests[1].prompt_ids == (3, 4, *said(opened, first), 5, 6)


def test_a_template_from_a_file_and_thinking(
    opened: subject.Opened, checkpoint: Path, tmp_path: Path
) -> None:
    """F65: the thinking setting reaches the template."""
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}w10 {{ m.content }} {% endfor %}")
    own = ask(opened, config(checkpoint, chat_template=str(path)), PROMPTS[1:2])
    assert own.requests[0].prompt_ids == (10, 8)
    for thinking, ids in ((True, (8, 3, 2)), (False, (8, 2)), (None, (8, 2))):
        found = ask(opened, config(checkpoint, enable_thinking=thinking), PROMPTS[1:2])
        assert found.requests[0].prompt_ids == ids
    with pytest.raises(DataError, match="neither a file nor one of chatml"):
        ask(opened, config(checkpoint, chat_template="missing"), PROMPTS)


def test_a_turn_that_does_not_fit_is_named(opened: subject.Opened, checkpoint: Path) -> None:
    long = Prompt(("w3", "w4 " * 124), None, "p:7")
    with pytest.raises(DataError, match=r"p:7, turn 2: a prompt of 129 tokens .* context of 128"):
        ask(opened, config(checkpoint), [long])


def test_sampling_parameters_reach_the_requests(opened: subject.Opened, checkpoint: Path) -> None:
    given = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}
    (request,) = ask(opened, config(checkpoint, **given), PROMPTS[1:2]).requests
    assert {name: getattr(request, name) for name in given} == given
    assert request.max_new_tokens == 3
    with pytest.raises(DataError, match="p:2: top_k is 100; it must lie between 0 and 61"):
        ask(opened, config(checkpoint, top_k=100), PROMPTS[1:2])
