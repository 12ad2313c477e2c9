"""Running variants of one decode in alternation, compilation kept out of every figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from specjax.decode.config import EngineConfig
from specjax.decode.engine import Engine, bucket, fit_capacity
from specjax.decode.requests import Request, Result, RunTimes
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.subject import Subject
from specjax.heads.base import Head, NullHead

PyTree = Any
OnResult = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to decode the same requests.

    Attributes:
        dtype: of the target's weights.
        head: what drafts; the null head is the baseline.
        head_params: its weights.
        num_speculative_tokens: drafts per round.
    """

    dtype: str
    head: Head
    head_params: PyTree
    num_speculative_tokens: int

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is drafted."""
        return self.num_speculative_tokens == 0

    @property
    def label(self) -> str:
        """Short name for progress bars and tables."""
        name = "baseline" if self.is_baseline else self.head.name
        drafts = "" if self.is_baseline else f" {self.num_speculative_tokens}"
        return f"{name}{drafts} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Pass:
    """One run over all requests.

    Attributes:
        results: in the order of the requests.
        times: its seconds; `times.compile` is outside the others.
    """

    results: list[Result]
    times: RunTimes


@dataclasses.dataclass(frozen=True)
class Measured:
    """All runs of one variant.

    Attributes:
        variant: what ran.
        compile_seconds: spent compiling, in the warm-up for the most part.
        passes: one per repeat.
    """

    variant: Variant
    compile_seconds: float
    passes: list[Pass]


def baseline(dtype: str) -> Variant:
    """Return the variant that does not speculate."""
    return Variant(dtype=dtype, head=NullHead(), head_params=(), num_speculative_tokens=0)


def engine_settings(config: EvalConfig) -> EngineConfig:
    """Return the engine's settings of an evaluation; drafts come from each variant."""
    return dataclasses.replace(config.engine, concurrency=config.concurrency)


def make_engine(subject: Subject, variant: Variant, settings: EngineConfig) -> Engine:
    """Return the engine of a variant.

    Raises:
        PairingError: the head cannot draft that many tokens, or does not fit the target.
    """
    settings = dataclasses.replace(
        settings,
        num_speculative_tokens=variant.num_speculative_tokens,
        capacity=settings.capacity or fit_capacity(subject.requests),
    )
    params = subject.params[variant.dtype]
    return Engine(subject.target, params, variant.head, variant.head_params, settings)


def warmup_requests(requests: Sequence[Request], prefill_chunk: int, drafts: int) -> list[Request]:
    """Return few, short requests that compile every program that `requests` will run."""
    chosen, seen = [], set()
    for request in requests:
        length = len(request.prompt_ids)
        buckets = {
            bucket(min(prefill_chunk, length - start), prefill_chunk)
            for start in range(0, length, prefill_chunk)
        }
        if not buckets <= seen:
            seen |= buckets
            few = min(request.max_new_tokens, 2 * (drafts + 1) + 1)
            chosen.append(dataclasses.replace(request, max_new_tokens=few))
    return chosen


def run_alternating(
    subject: Subject,
    variants: Sequence[Variant],
    settings: EngineConfig,
    repeats: int,
    on_result: OnResult | None = None,
) -> list[Measured]:
    """Measure variants in alternation: each repeat runs all of them, every other one backwards.

    Args:
        subject: target, weights and requests.
        variants: what to run.
        settings: of the engine; drafts come from the variants.
        repeats: passes per variant.
        on_result: called with the variant's label for every request answered, warm-up included.

    Returns:
        Measurements in the order of the variants.
    """
    engines = [make_engine(subject, variant, settings) for variant in variants]
    notify = on_result or (lambda label: None)
    compiled = []
    for variant, engine in zip(variants, engines, strict=True):
        few = warmup_requests(
            subject.requests, settings.prefill_chunk, variant.num_speculative_tokens
        )
        compiled.append(_run(engine, few, lambda: notify("warm-up")).times.compile)
    passes: list[list[Pass]] = [[] for _ in variants]
    for repeat in range(repeats):
        order = range(len(variants))
        for i in order if repeat % 2 == 0 else reversed(order):
            label = variants[i].label
            done = _run(engines[i], subject.requests, lambda label=label: notify(label))
            passes[i].append(done)
            compiled[i] += done.times.compile
    return [Measured(*row) for row in zip(variants, compiled, passes, strict=True)]


def _run(engine: Engine, requests: Sequence[Request], notify: Callable[[], None]) -> Pass:
    results = engine.generate(requests, on_result=lambda _: notify())
    assert engine.times is not None
    return Pass(results=results, times=engine.times)
