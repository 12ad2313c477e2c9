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
from specjax.evaluation.subject import Subject
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
        head_source="known",
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
def rows(config: EvalConfig, subject: Subject) -> list[Record]:
    """Records of the baseline and of 3 drafts, 2 of which are right."""
    return runner.evaluate(config, subject, (config.num_speculative_tokens,))


@pytest.fixture
def recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: EvalConfig, subject: Subject
) -> Any:
    """Return a function that runs a whole evaluation into `tmp_path` with the tiny subject."""

    def go(**changes: Any) -> list[Record]:
        monkeypatch.setattr(runner, "load", lambda _: subject)
        return runner.run(dataclasses.replace(config, out=str(tmp_path), **changes), "# settings")

    return go
