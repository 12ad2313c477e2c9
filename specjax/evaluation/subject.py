"""What an evaluation measures: a target, a head and requests, loaded and checked before any run."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from specjax import heads, targets
from specjax.core.errors import CheckpointError, DataError, RequestError
from specjax.data.chat import ChatEncoder
from specjax.data.prompts import Prompt, load_prompts
from specjax.decode.requests import Request
from specjax.evaluation import demo
from specjax.evaluation.config import EvalConfig
from specjax.heads import pairing
from specjax.heads.base import Head, borrow
from specjax.io.hf import resolve
from specjax.targets.base import Target

PyTree = Any
_WORDS = ("none", "ngram", "mtp")  # heads that are no directory


@dataclasses.dataclass(frozen=True)
class Subject:
    """A target, a head and requests.

    Attributes:
        target: the target.
        params: its weights in every dtype that is measured, by dtype.
        head: the draft head; the null head where the baseline alone is measured.
        head_params: its weights, in the dtype of the speculative run.
        requests: the prompts and how to answer them.
        target_name: what records call the target.
        head_source: where the head came from.
        notes: what a reader of the figures must know.
    """

    target: Target
    params: dict[str, PyTree]
    head: Head
    head_params: PyTree
    requests: tuple[Request, ...]
    target_name: str
    head_source: str
    notes: tuple[str, ...] = ()

    @property
    def prompts_sha256(self) -> str:
        """Fingerprint of the prompts' token ids."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(np.asarray([len(request.prompt_ids), *request.prompt_ids], "<i4"))
        return digest.hexdigest()


def load(config: EvalConfig) -> Subject:
    """Load what the configuration names.

    Raises:
        SpecJaxError: one line, whatever is wrong: the checkpoint, the head, the prompt file, a
            prompt that does not fit.
    """
    if not config.target:
        return _embedded(config)
    # The cheap checks first: a misspelt prompt file should not cost a load of the weights.
    prompts = load_prompts(config.prompts, limit=config.num_prompts or None)
    root = resolve(config.target)
    _check_head(config.head)
    params: dict[str, PyTree] = {}
    for dtype in config.baseline_dtypes:
        target, params[dtype] = targets.load(root, dtype, how=config.target_options)
    head, head_params = heads.find(
        config.head,
        root,
        target.info,
        config.dtype,
        config.ngram,
        borrow(target, params[config.dtype]),
    )
    return Subject(
        target=target,
        params=params,
        head=head,
        head_params=head_params,
        requests=_requests(prompts, _tokenizer(root), target, config),
        target_name=root.resolve().name,
        head_source=config.head,
        notes=(*_notes(prompts, config), *_lent(config.head)),
    )


def _lent(source: str) -> tuple[str, ...]:
    """Say which rows of a head's file are the target's."""
    if source in _WORDS or source.startswith("small_model:"):
        return ()
    note = pairing.note(resolve(source))
    return (note,) if note else ()


def _check_head(source: str) -> None:
    """Refuse a head that is not there before the target is loaded."""
    word, colon, rest = source.partition(":")
    if source not in _WORDS:
        resolve(rest if word == "small_model" and colon else source)


def _embedded(config: EvalConfig) -> Subject:
    target, params, head, head_params = demo.models(
        config.baseline_dtypes, config.dtype, config.target_options
    )
    prompts = demo.prompts(target, config.num_prompts)
    return Subject(
        target=target,
        params=params,
        head=head,
        head_params=head_params,
        requests=tuple(_request(ids, i, config) for i, ids in enumerate(prompts)),
        target_name=demo.NAME,
        head_source=demo.NAME,
        notes=(demo.NOTICE,),
    )


def _tokenizer(root: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(root)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0][:120]
        raise CheckpointError(f"{root}: its tokenizer cannot be loaded ({reason})") from None


def _requests(
    prompts: list[Prompt], tokenizer: Any, target: Target, config: EvalConfig
) -> tuple[Request, ...]:
    """Tokenize prompts; a prompt that does not fit the target is named by file and line."""
    info = target.info
    if config.chat_template:
        thinking = config.enable_thinking
        options = {} if thinking is None else {"enable_thinking": thinking}
        encoder = ChatEncoder(tokenizer, info.stop_ids, **options)
        encoded = [encoder.prompt_ids(prompt.opening()) for prompt in prompts]
    else:
        encoded = [tokenizer(prompt.turns[0])["input_ids"] for prompt in prompts]
    requests = []
    for i, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        request = _request(tuple(ids), i, config)
        try:
            request.check(info.vocab, config.engine.capacity or info.max_context, info.max_context)
        except RequestError as error:
            raise DataError(f"{prompt.source}: {error}") from None
        requests.append(request)
    return tuple(requests)


def _request(ids: tuple[int, ...], index: int, config: EvalConfig) -> Request:
    return Request(
        prompt_ids=ids,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=config.seed + index,
    )


def _notes(prompts: list[Prompt], config: EvalConfig) -> tuple[str, ...]:
    notes = []
    if config.chat_template and config.enable_thinking is not None:
        notes.append(f"The chat template ran with enable_thinking={config.enable_thinking}.")
    several = sum(len(prompt.turns) > 1 for prompt in prompts)
    if several:
        notes.append(f"{several} prompts have further turns; only their first was asked.")
    if config.num_prompts > len(prompts):
        notes.append(f"The file holds {len(prompts)} prompts, fewer than {config.num_prompts}.")
    return tuple(notes)
