"""Prompts to requests; in conversations of several turns the answers go into the next prompt.

The answers in between are given once, by the target without a head and with the sampling of the
evaluation, before anything is measured. So every run answers the same requests: texts can be
compared and speeds are like with like, for later turns as for first ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specjax.core.errors import DataError, RequestError
from specjax.data.chat import ChatEncoder
from specjax.data.prompts import Prompt
from specjax.data.templates import read_template
from specjax.decode.engine import Engine
from specjax.decode.requests import Request, Result
from specjax.evaluation.config import EvalConfig
from specjax.targets.base import Target

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Asked:
    """The requests of a prompt set.

    Attributes:
        requests: first turns in the order of the prompts, then second turns, and so on.
        prompt_of: index of the prompt of each request.
        answers: the right answer to each request, None where none is known.
    """

    requests: tuple[Request, ...]
    prompt_of: tuple[int, ...]
    answers: tuple[str | None, ...]


def ask(
    target: Target,
    params: PyTree,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    on_result: Callable[[Result], None] | None = None,
) -> Asked:
    """Build all requests; what they need of the target's answers is decoded here.

    Args:
        target: the target.
        params: its weights, in the dtype that answers the turns in between.
        tokenizer: its tokenizer.
        prompts: at least one.
        config: how to render and sample.
        on_result: called with every answer decoded here.

    Raises:
        DataError: a prompt that the chat template refuses or that does not fit the target, named
            by file and line.
    """
    write = _writer(tokenizer, target, config)
    requests: list[Request] = []
    prompt_of: list[int] = []
    answers: list[str | None] = []
    before: dict[int, list[_Answered]] = {i: [] for i in range(len(prompts))}
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        asked = [i for i, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        first = len(requests)
        for i in asked:
            with _named(prompts[i], turn):
                ids = write(prompts[i], before[i])
                requests.append(request_of(ids, len(requests), config))
                _check(requests[-1], target, config)
            last = turn == len(prompts[i].turns) - 1
            answers.append(prompts[i].answer if last else None)
        prompt_of += asked
        go_on = [n for n, i in enumerate(asked) if turn + 1 < len(prompts[i].turns)]
        if not go_on:
            continue
        settings = dataclasses.replace(
            config.engine, concurrency=config.concurrency, verification="fixed", cost_table=""
        )
        engine = Engine(target, params, config=settings)
        batch = [requests[first + n] for n in go_on]
        for n, result in zip(go_on, engine.generate(batch, on_result), strict=True):
            ids = result.token_ids[:-1] if result.finish_reason == "stop" else result.token_ids
            text = tokenizer.decode(ids, skip_special_tokens=True)
            before[asked[n]].append(_Answered(requests[first + n].prompt_ids + ids, text))
    return Asked(tuple(requests), tuple(prompt_of), tuple(answers))


def request_of(ids: Sequence[int], index: int, config: EvalConfig) -> Request:
    """Return the request of a rendered prompt; `index` counts requests."""
    return Request(
        prompt_ids=tuple(ids),
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=config.seed + index,
    )


@dataclasses.dataclass(frozen=True)
class _Answered:
    """A turn that was answered: all ids up to the answer's end, and the answer's text."""

    ids: tuple[int, ...]
    text: str


def _writer(
    tokenizer: Any, target: Target, config: EvalConfig
) -> Callable[[Prompt, Sequence[_Answered]], Sequence[int]]:
    """Return what renders the next turn of a prompt."""
    if config.chat_template is False:

        def plain(prompt: Prompt, before: Sequence[_Answered]) -> Sequence[int]:
            turn = prompt.turns[len(before)]
            if not before:
                return tokenizer(turn)["input_ids"]
            return (*before[-1].ids, *tokenizer(turn, add_special_tokens=False)["input_ids"])

        return plain
    template = config.chat_template
    text = read_template(template, tokenizer) if isinstance(template, str) else None
    thinking = config.enable_thinking
    options = {} if thinking is None else {"enable_thinking": thinking}
    encoder = ChatEncoder(tokenizer, target.info.stop_ids, text, **options)
    return lambda prompt, before: encoder.prompt_ids(prompt.messages([a.text for a in before]))


def _check(request: Request, target: Target, config: EvalConfig) -> None:
    info = target.info
    capacity = config.engine.capacity or info.max_context + 1  # the target's limit is the limit
    request.check(info.vocab, capacity, info.max_context)


@contextlib.contextmanager
def _named(prompt: Prompt, turn: int) -> Iterator[None]:
    """Let errors name the prompt and, where there are several, the turn."""
    try:
        yield
    except (RequestError, DataError) as error:
        which = f", turn {turn + 1}" if len(prompt.turns) > 1 else ""
        raise DataError(f"{prompt.source}{which}: {error}") from None
