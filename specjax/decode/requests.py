"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.core.errors import RequestError, nearest

_UNSUPPORTED = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "n",
    "best_of",
    "beam_width",
    "bad_words",
    "guided_decoding",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
        max_new_tokens: most tokens to generate; exact unless a stop token comes first.
        temperature: 0 (anything below 1e-5) is greedy.
        top_k: keep the k most probable tokens; 0 is off.
        top_p: keep the smallest set of tokens with this mass; 1 is off.
        min_p: keep tokens with at least this share of the largest probability; 0 is off.
        seed: of this request's randomness, 0 to 2**32 - 1.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @classmethod
    def from_options(cls, prompt_ids: tuple[int, ...], options: Mapping[str, Any]) -> Request:
        """Build a request from named options.

        Raises:
            RequestError: an option that we do not have, named; never ignored.
        """
        known = {f.name for f in dataclasses.fields(cls)} - {"prompt_ids"}
        for name in options:
            if name in _UNSUPPORTED:
                raise RequestError(f"option {name!r} is not supported and was not ignored")
            if name not in known:
                raise RequestError(f"unknown request option {name!r}{nearest(name, known)}")
        return cls(prompt_ids=tuple(prompt_ids), **options)

    def check(self, vocab: int, capacity: int, max_context: int) -> None:
        """Refuse what cannot be served.

        Args:
            vocab: size of the target's vocabulary.
            capacity: longest prompt plus new tokens that the caches hold.
            max_context: the target's own limit.

        Raises:
            RequestError: one line naming the value and what would be right.
        """
        size, new = len(self.prompt_ids), self.max_new_tokens
        if not size:
            raise RequestError("a request needs at least one prompt token")
        if new < 1:
            raise RequestError(f"max_new_tokens is {new}; it must be at least 1")
        bad = [i for i in self.prompt_ids if not 0 <= i < vocab]
        if bad:
            raise RequestError(f"prompt token {bad[0]} is outside the vocabulary of {vocab}")
        if size + new > min(capacity, max_context):
            limit = (
                f"the target's longest context of {max_context}"
                if max_context < capacity
                else f"the engine's capacity of {capacity} (Engine.capacity)"
            )
            raise RequestError(
                f"a prompt of {size} tokens with max_new_tokens {new} does not fit {limit}"
            )
        ranges = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, vocab),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("seed", self.seed, 0, 2**32 - 1),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:  # also catches NaN
                raise RequestError(f"{name} is {value}; it must lie between {low} and {high}")


@dataclasses.dataclass(frozen=True)
class Result:
    """The answer to one request and what it took.

    Attributes:
        index: place of the request in the list that was given.
        token_ids: generated ids, the stop token included where there is one.
        finish_reason: "stop" or "length".
        rounds: verify passes that this request took part in (the first token comes from prefill).
        drafted: per draft position, how often a draft there was verified.
        accepted: per draft position, how often it was accepted and emitted.
        first_token_seconds: from the start of the run to this request's first token.
        finish_seconds: from the start of the run to the host's seeing its end.
        start_seconds: from the start of the run to its leaving the queue for a lane. None of the
            three holds seconds of compiling.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    first_token_seconds: float
    finish_seconds: float
    start_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class RunTimes:
    """Seconds of one `Engine.run`, compilation apart.

    Attributes:
        total: wall time, compilation included.
        prefill: prompts, inserts and first tokens.
        decode: decode rounds.
        compile: programs compiled during the run (0 after a warm-up).
        rounds: decode rounds run.
    """

    total: float
    prefill: float
    decode: float
    compile: float
    rounds: int
