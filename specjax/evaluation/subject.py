"""What an evaluation measures: a target, a head and requests, loaded and checked before any run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax import heads, targets
from specjax.core.errors import CheckpointError
from specjax.core.sharding import Layout
from specjax.data.prompts import Prompt, load_prompts
from specjax.decode.requests import Request, Result
from specjax.evaluation import demo, turns
from specjax.evaluation.config import EvalConfig
from specjax.heads import pairing
from specjax.heads.base import Head, NullHead, borrow
from specjax.io.hf import resolve
from specjax.targets.base import Target

PyTree = Any
_WORDS = ("none", "ngram", "mtp")  # heads that are no directory


@dataclasses.dataclass(frozen=True)
class Opened:
    """A target with its weights in every dtype that is measured.

    Attributes:
        target: the target; on a mesh it knows how its weights lie there.
        params: its weights by dtype.
        name: what records call it.
        root: its directory; None for the embedded default.
        tokenizer: its tokenizer; None for the embedded default.
        own_head: of the embedded default: its head and the head's weights.
    """

    target: Target
    params: dict[str, PyTree]
    name: str
    root: Path | None = None
    tokenizer: Any = None
    own_head: tuple[Head, PyTree] | None = None


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
        prompt_of: which prompt each request is of; () where each is one of its own.
        answers: the right answers to the requests, None where none is known; () for none at all.
        decode: from token ids to text; None where nothing can be read.
    """

    target: Target
    params: dict[str, PyTree]
    head: Head
    head_params: PyTree
    requests: tuple[Request, ...]
    target_name: str
    head_source: str
    notes: tuple[str, ...] = ()
    prompt_of: tuple[int, ...] = ()
    answers: tuple[str | None, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    @property
    def groups(self) -> tuple[int, ...]:
        """The prompt of each request."""
        return self.prompt_of or tuple(range(len(self.requests)))

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
    if config.target:
        # The cheap checks first: a misspelt prompt file should not cost a load of the weights.
        load_prompts(config.prompts, limit=config.num_prompts or None)
        _check_head(config.head)
    opened = open_target(config)
    return with_head(with_requests(opened, config), opened, config)


def open_target(config: EvalConfig) -> Opened:
    """Load a target and its tokenizer; onto a mesh each device reads its own share of the weights.

    Raises:
        CheckpointError: it cannot be loaded.
        ConfigError: a mesh that the machine or the weights do not fit.
    """
    layout = Layout.served(config.engine.mesh)
    if not config.target:
        target, params, head, head_params = demo.models(
            config.baseline_dtypes, config.dtype, config.target_options, layout
        )
        return Opened(target, params, demo.NAME, own_head=(head, head_params))
    root = resolve(config.target)
    params = {}
    for dtype in config.baseline_dtypes:
        target, params[dtype] = targets.load(root, dtype, _shares(layout), config.target_options)
    target = dataclasses.replace(target, layout=layout)
    return Opened(target, params, root.resolve().name, root, _tokenizer(root))


def with_requests(
    opened: Opened, config: EvalConfig, on_result: Callable[[Result], None] | None = None
) -> Subject:
    """Return the subject of a baseline: a target and requests, no head.

    Args:
        opened: the target.
        config: which prompts, and how to ask them.
        on_result: called with the answers to all turns but the last ones, which are decoded here.

    Raises:
        DataError: a prompt set that is not there, or a prompt that does not fit.
    """
    bare = Subject(
        target=opened.target,
        params=opened.params,
        head=NullHead(),
        head_params=(),
        requests=(),
        target_name=opened.name,
        head_source="none",
    )
    if opened.root is None:
        ids = demo.prompts(opened.target, config.num_prompts)
        requests = tuple(turns.request_of(each, i, config) for i, each in enumerate(ids))
        return dataclasses.replace(bare, requests=requests, notes=(demo.NOTICE, *_spread(config)))
    prompts = load_prompts(config.prompts, limit=config.num_prompts or None)
    params = opened.params[config.baseline_dtypes[0]]
    asked = turns.ask(opened.target, params, opened.tokenizer, prompts, config, on_result)
    return dataclasses.replace(
        bare,
        requests=asked.requests,
        prompt_of=asked.prompt_of,
        answers=asked.answers,
        decode=functools.partial(opened.tokenizer.decode, skip_special_tokens=True),
        notes=(*_notes(prompts, config), *_spread(config)),
    )


def with_head(subject: Subject, opened: Opened, config: EvalConfig) -> Subject:
    """Return the subject with the head that the configuration names.

    Raises:
        CheckpointError: there is no such head.
        PairingError: it does not belong to the target.
    """
    if opened.own_head is not None:
        head, params = opened.own_head
        return dataclasses.replace(subject, head=head, head_params=params, head_source=demo.NAME)
    target = opened.target
    borrowed = borrow(target, opened.params[config.dtype])
    head, params = heads.find(
        config.head,
        opened.root or "",
        target.info,
        config.dtype,
        config.ngram,
        borrowed,
        _shares(target.layout),
    )
    return dataclasses.replace(
        subject,
        head=head,
        head_params=params,
        head_source=config.head,
        notes=(*subject.notes, *_lent(config.head)),
    )


def _shares(layout: Layout | None) -> Callable[[PyTree], PyTree] | None:
    """Return the shardings of weights as loaders take them; None on one device."""
    return None if layout is None else layout.weights


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


def _tokenizer(root: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(root)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0][:120]
        raise CheckpointError(f"{root}: its tokenizer cannot be loaded ({reason})") from None


def _spread(config: EvalConfig) -> tuple[str, ...]:
    mesh = config.engine.mesh
    return (f"Spread over {mesh.devices} devices: {mesh.name}.",) if mesh.devices > 1 else ()


def _notes(prompts: Sequence[Prompt], config: EvalConfig) -> tuple[str, ...]:
    # F65: how the prompts were rendered stands beside every figure.
    thinking = config.enable_thinking
    template = config.chat_template
    if isinstance(template, str):
        said = f"the chat template {Path(template).name}"
    else:
        said = "the target's own chat template" if template else "no chat template"
    if config.chat_template is not False:
        said += ", thinking left to it" if thinking is None else f", enable_thinking={thinking}"
    notes = [f"Prompts were rendered with {said}."]
    if any(len(prompt.turns) > 1 for prompt in prompts):
        notes.append(
            "Later turns are asked after the answers that the target gave without a head, the same"
            " in every run."
        )
    if config.num_prompts > len(prompts):
        notes.append(f"The prompt set holds {len(prompts)}, fewer than {config.num_prompts}.")
    return tuple(notes)
