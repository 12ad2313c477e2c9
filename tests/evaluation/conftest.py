"""One tiny subject, its records and a directory of them, made once for all evaluation tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import targets
from specjax.core.params import init_params
from specjax.decode.config import EngineConfig
from specjax.decode.engine import Engine
from specjax.decode.requests import Request
from specjax.evaluation import runner
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.records import Record
from specjax.evaluation.subject import Opened, Subject
from specjax.evaluation.sweep import Cell
from specjax.heads.base import NullHead
from specjax.io.hf import save_checkpoint
from tests.evaluation.known import CONFIG, VOCAB, KnownHead

NEW = 13  # 1 from prefill, then 4 rounds of 2 drafts and a bonus


@pytest.fixture(scope="package")
def subject() -> Subject:
    target = targets.from_config(CONFIG)
    params = init_params(target.specs(), jax.random.key(0), scale=0.4)
    rng = np.random.default_rng(1)
    requests = tuple(
        Request((i, *map(int, rng.integers(10, VOCAB, 3 + 4 * i))), NEW) for i in range(4)
    )
    engine = Engine(target, params, config=EngineConfig(capacity=64))
    texts = np.zeros((len(requests), 64), np.int32)
    for i, result in enumerate(engine.generate(requests)):
        text = requests[i].prompt_ids + result.token_ids
        texts[i, : len(text)] = text
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    return Subject(
        target=target,
        params={"float32": params, "bfloat16": half},
        head=KnownHead(),
        head_params=jax.numpy.asarray(texts),
        requests=requests,
        target_name="tiny",
        head_source="tiny-random",
        notes=("a note",),
    )


@pytest.fixture(scope="package")
def config() -> EvalConfig:
    return EvalConfig(
        target="tiny",
        head="known",
        prompts="made here",
        num_speculative_tokens=3,
        concurrency=2,
        max_new_tokens=NEW,
        repeats=2,
        engine=EngineConfig(capacity=64),
    )


@pytest.fixture(scope="package")
def opened(subject: Subject) -> Opened:
    """The tiny target; its own head is the known one."""
    own = subject.head, subject.head_params
    return Opened(subject.target, subject.params, "tiny", own_head=own)


@pytest.fixture(scope="package")
def base(subject: Subject) -> Subject:
    """The tiny requests without a head."""
    return dataclasses.replace(subject, head=NullHead(), head_params=(), head_source="none")


def cell_of(config: EvalConfig, key: str = "its key") -> Cell:
    """A cell whose files are not looked at."""
    return Cell(config, {"target": "a", "head": "b", "prompts": "c"}, key, "the baseline's")


@pytest.fixture(scope="package")
def rows(config: EvalConfig, opened: Opened, base: Subject) -> list[Record]:
    """Records of the baseline and of 3 drafts, 2 of which are right."""
    return list(runner.measure([cell_of(config)], opened, base))


@pytest.fixture
def recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: EvalConfig,
    opened: Opened,
    base: Subject,
) -> Any:
    """Return a function that runs a whole evaluation into `tmp_path` with the tiny subject."""

    def go(**changes: Any) -> list[Record]:
        monkeypatch.setattr(runner, "plan", lambda configs: [cell_of(c) for c in configs])
        monkeypatch.setattr(runner, "open_target", lambda _: opened)
        monkeypatch.setattr(runner, "with_requests", lambda *_: base)
        return runner.run(dataclasses.replace(config, out=str(tmp_path), **changes), "# settings")

    return go


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: Any) -> Path:
    """Save a tiny target with a tokenizer: the words w0 ... w60."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("target")
    target = targets.from_config(CONFIG)
    params = init_params(target.specs(), jax.random.key(0), scale=0.4)
    save_checkpoint(target.specs(), params, CONFIG, path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0")
    fast.chat_template = (
        "{% for m in messages %}{{ m.content }} {% endfor %}"
        "{% if enable_thinking %}w3 {% endif %}w2"
    )
    fast.save_pretrained(path)
    return path
