"""Running variants of one decode in alternation, compilation kept out of every figure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specjax.core.errors import PairingError
from specjax.decode.config import EngineConfig
from specjax.decode.engine import Engine, bucket, fit_capacity
from specjax.decode.requests import Request, Result, RunTimes
from specjax.evaluation import machine
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
        settings: of the engine.
    """

    dtype: str
    head: Head
    head_params: PyTree
    settings: EngineConfig

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts per round."""
        return self.settings.num_speculative_tokens

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is drafted."""
        return self.num_speculative_tokens == 0

    @property
    def label(self) -> str:
        """Short name for progress bars."""
        name = "baseline" if self.is_baseline else self.head.name
        drafts = "" if self.is_baseline else f" {self.num_speculative_tokens}"
        return f"{name}{drafts} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Pass:
    """One run over all requests.

    Attributes:
        results: in the order of the requests.
        times: its seconds; `times.compile` is outside the others.
        peak_bytes: most memory in use, see `machine.peak_memory_bytes`.
    """

    results: list[Result]
    times: RunTimes
    peak_bytes: int | None = None


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


def baseline(config: EvalConfig, dtype: str) -> Variant:
    """Return the variant that does not speculate."""
    settings = dataclasses.replace(
        config.engine,
        concurrency=config.concurrency,
        num_speculative_tokens=0,
        verification="fixed",
        cost_table="",
    )
    return Variant(dtype, NullHead(), (), settings)


def speculative(config: EvalConfig, subject: Subject) -> Variant:
    """Return the variant that a configuration asks for."""
    settings = dataclasses.replace(
        config.engine,
        concurrency=config.concurrency,
        num_speculative_tokens=config.num_speculative_tokens,
    )
    return Variant(config.dtype, subject.head, subject.head_params, settings)


def make_engine(subject: Subject, variant: Variant) -> Engine:
    """Return the engine of a variant.

    Raises:
        PairingError: the head cannot draft that many tokens, they do not fit the caches, or the
            head does not fit the target.
    """
    capacity = variant.settings.capacity or fit_capacity(subject.requests)
    if variant.num_speculative_tokens >= capacity:
        raise PairingError(
            f"num_speculative_tokens is {variant.num_speculative_tokens}, but the longest request"
            f" has {capacity} positions in all"
        )
    settings = dataclasses.replace(variant.settings, capacity=capacity)
    params = subject.params[variant.dtype]
    return Engine(subject.target, params, variant.head, variant.head_params, settings)


def warmup_requests(requests: Sequence[Request], prefill_chunk: int, drafts: int) -> list[Request]:
    """Return few, short requests that compile every program that `requests` will run."""
    chosen: list[Request] = []
    seen: set[int] = set()
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
    repeats: int,
    on_result: OnResult | None = None,
    keep_going: bool = False,
) -> list[Measured | Exception]:
    """Measure variants in alternation: each repeat runs all of them, every other one backwards.

    Args:
        subject: target, weights and requests.
        variants: what to run.
        repeats: passes per variant.
        on_result: called with the variant's label for every request answered, warm-up included.
        keep_going: let the others go on where a variant that speculates fails.

    Returns:
        Measurements in the order of the variants; with `keep_going`, of those that failed the
        error.
    """
    notify = on_result or (lambda label: None)
    engines: dict[int, Engine] = {}
    compiled = [0.0] * len(variants)
    passes: list[list[Pass]] = [[] for _ in variants]
    errors: dict[int, Exception] = {}

    @contextlib.contextmanager
    def attempt(i: int) -> Iterator[None]:
        """Keep the error of a variant that may fail, whatever it is: out of memory, too."""
        try:
            yield
        except Exception as error:
            if not keep_going or variants[i].is_baseline:
                raise
            errors[i] = error

    for i, variant in enumerate(variants):  # all, before anything takes time
        with attempt(i):
            engines[i] = make_engine(subject, variant)
    for i, variant in enumerate(variants):
        if i in errors:
            continue
        with attempt(i):
            chunk = variant.settings.prefill_chunk
            few = warmup_requests(subject.requests, chunk, variant.num_speculative_tokens)
            compiled[i] += _run(engines[i], few, lambda: notify("warm-up")).times.compile
    for repeat in range(repeats):
        order = range(len(variants))
        for i in order if repeat % 2 == 0 else reversed(order):
            if i in errors:
                continue
            label = variants[i].label
            with attempt(i):
                done = _run(engines[i], subject.requests, functools.partial(notify, label))
                passes[i].append(done)
                compiled[i] += done.times.compile
    return [
        errors.get(i) or Measured(variant, compiled[i], passes[i])
        for i, variant in enumerate(variants)
    ]


def _run(engine: Engine, requests: Sequence[Request], notify: Callable[[], None]) -> Pass:
    machine.reset_peak_memory()
    results = engine.generate(requests, on_result=lambda _: notify())
    assert engine.times is not None
    return Pass(results=results, times=engine.times, peak_bytes=machine.peak_memory_bytes())
