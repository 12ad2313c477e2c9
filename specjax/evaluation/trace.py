"""Traces: a few texts token by token, with how each came and what was drafted and thrown away."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from specjax.decode.engine import Engine
from specjax.decode.requests import Request, Result
from specjax.evaluation.playback import Round, play

Decode = Callable[[Sequence[int]], str]
_TAIL = 8  # tokens before one that can change how it reads


def trace(
    engine: Engine,
    requests: Sequence[Request],
    measured: Sequence[Result],
    decode: Decode | None,
) -> list[dict[str, Any]]:
    """Decode requests again and note how every token came.

    Args:
        engine: of the measured run's head and settings.
        requests: the prompts to trace.
        measured: their results in the run.
        decode: from token ids to text; without it texts are the ids.

    Returns:
        For each request "request" (its index), "prompt", "finish_reason", "same_text" (whether it
        is the measured one, token for token) and "rounds": each with "emitted" and "drafts" as
        texts, how many were "verified" and "accepted", and "confidence" of each draft, or None.
        The first round is the prompt pass.
    """
    rounds: list[list[Round]] = [[] for _ in requests]
    for each in play(engine, requests):
        rounds[each.request].append(each)
    texts = []
    for i, (request, result) in enumerate(zip(requests, measured, strict=True)):
        ids = list(request.prompt_ids)
        prompt = len(ids)
        played = []
        for each in rounds[i]:
            drafts = each.drafts[: each.proposed].tolist()
            sure = each.confidence
            played.append(
                {
                    "emitted": pieces(ids, each.emitted, decode),
                    "drafts": pieces(ids, drafts, decode),
                    "verified": each.verified,
                    "accepted": each.accepted,
                    "confidence": None if sure is None else sure[: each.proposed].tolist(),
                }
            )
            ids += each.emitted
        texts.append(
            {
                "request": i,
                "prompt": "".join(pieces([], request.prompt_ids, decode)),
                "finish_reason": result.finish_reason,
                "same_text": tuple(ids[prompt:]) == result.token_ids,
                "rounds": played,
            }
        )
    return texts


def pieces(before: Sequence[int], ids: Sequence[int], decode: Decode | None) -> list[str]:
    """Return what each token adds to the text; those that add none are shown by their ids.

    A character of several tokens reads as the replacement character until its last token.
    """
    if decode is None:
        return [f"{i} " for i in ids]
    history, found = list(before[-_TAIL:]), []
    for i in ids:
        known, text = decode(history[-_TAIL:]), decode([*history[-_TAIL:], i])
        pairs = zip(known, text, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        found.append(text[same:] or f"⟨{i}⟩")
        history.append(i)
    return found
