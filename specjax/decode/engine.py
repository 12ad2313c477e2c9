"""The engine: a queue of prompts, a fixed number of lanes, and the jitted loop between them.

Shapes are static: one program for the rounds, one for the insert, one per prefill bucket. The
loop returns to the host when a lane ends or after `rounds_per_call` rounds; there finished lanes
are read out and refilled.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import hosts
from specjax.core.errors import PairingError, RequestError
from specjax.core.sharding import Layout
from specjax.decode import round as rounds_module
from specjax.decode.compiles import CompileClock
from specjax.decode.config import EngineConfig
from specjax.decode.costs import Costs, profile, read_costs
from specjax.decode.placement import put_weights
from specjax.decode.requests import Request, Result, RunTimes
from specjax.decode.round import Decoder, RoundState, Weights, init_state
from specjax.decode.schedule import Schedule, choose_widths
from specjax.heads.base import Head, NullHead
from specjax.layers.sampling import Sampling
from specjax.targets.base import Target

PyTree = Any
_SMALLEST_BUCKET = 16
_CAPACITY_STEP = 64


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _run_rounds(
    decoder: Decoder, weights: Weights, state: RoundState, limit: jax.Array
) -> tuple[RoundState, jax.Array]:
    return rounds_module.rounds(decoder, weights, state, limit)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill_chunk(
    decoder: Decoder,
    weights: Weights,
    state: RoundState,
    chunk: jax.Array,
    valid: jax.Array,
    following: jax.Array,
) -> RoundState:
    return rounds_module.prefill_chunk(decoder, weights, state, chunk, valid, following)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _insert(decoder: Decoder, state: RoundState, lane: jax.Array, single: RoundState) -> RoundState:
    return rounds_module.insert(decoder, state, lane, single)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _init_state(decoder: Decoder, batch: int, capacity: int, cache_dtype: str) -> RoundState:
    return init_state(decoder, batch, capacity, cache_dtype)


def bucket(length: int, longest: int) -> int:
    """Return the padded length of a prompt piece: a power of two, at most `longest`."""
    size = _SMALLEST_BUCKET
    while size < min(length, longest):
        size *= 2
    return min(size, longest)


def fit_capacity(requests: Iterable[Request]) -> int:
    """Return the smallest capacity, a multiple of 64, that fits every request."""
    longest = max((len(r.prompt_ids) + r.max_new_tokens for r in requests), default=1)
    return -(-longest // _CAPACITY_STEP) * _CAPACITY_STEP


class Engine:
    """Decodes requests with a target and a draft head.

    Compiled programs are shared by all engines whose target, head and settings are equal.
    """

    def __init__(
        self,
        target: Target,
        params: PyTree,
        head: Head | None = None,
        head_params: PyTree = (),
        config: EngineConfig | None = None,
        stop_ids: Sequence[int] | None = None,
    ) -> None:
        """Pair a target with a head.

        Args:
            target: the target.
            params: its weights.
            head: the draft head; None decodes without speculation.
            head_params: its weights.
            config: settings.
            stop_ids: tokens that end a text; None takes the target's.

        Raises:
            PairingError: more drafts asked for than the head can give, or none of its taps exist.
            ConfigError: a mesh that the machine, the lanes or the weights do not fit.
        """
        config = config or EngineConfig()
        if head is None:
            head, head_params = NullHead(), ()
            config = dataclasses.replace(config, num_speculative_tokens=0)
        k = config.num_speculative_tokens
        if k < 0:
            raise PairingError(f"num_speculative_tokens is {k}; it must be at least 0")
        if head.max_tokens is not None and k > head.max_tokens:
            raise PairingError(
                f"num_speculative_tokens is {k}, but this {head.name} head drafts at most"
                f" {head.max_tokens}"
            )
        if config.concurrency < 1:
            raise RequestError(f"concurrency is {config.concurrency}; it must be at least 1")
        layers = target.info.num_layers
        if any(not 0 <= tap <= layers for tap in head.taps):
            raise PairingError(
                f"the {head.name} head taps layers {head.taps}; the target has 0..{layers}"
            )
        self.config = config
        layout = Layout.served(config.mesh)
        if layout is not None:
            layout.check_rows(config.concurrency, "Engine.concurrency")
            params = put_weights(layout, target.specs(), params, "target")
            target = dataclasses.replace(target, layout=layout)
            head_params = put_weights(layout, head.specs(), head_params, f"{head.name} head")
        self.weights = Weights(target=params, head=head_params)
        self.decoder = Decoder(
            target=target,
            head=head,
            num_speculative_tokens=k,
            stop_ids=tuple(target.info.stop_ids if stop_ids is None else stop_ids),
            greedy_drafts=config.draft_sampling == "greedy",
            schedule=_schedule_of(config, k),
            layout=layout,
        )
        dtype = jax.tree.leaves(params)[0].dtype
        on_cpu = jax.default_backend() == "cpu"
        self.cache_dtype = (
            ("float32" if on_cpu else str(dtype))
            if config.cache_dtype == "auto"
            else config.cache_dtype
        )
        self.times: RunTimes | None = None
        self.costs: Costs | None = read_costs(config.cost_table) if config.cost_table else None
        if self.decoder.schedule is not None:
            self._check_confidences()

    def generate(
        self,
        requests: Sequence[Request],
        on_result: Callable[[Result], None] | None = None,
    ) -> list[Result]:
        """Answer requests in any number; lanes are refilled from the queue as they end.

        Args:
            requests: the prompts.
            on_result: called with each result as soon as the host sees its end.

        Returns:
            Results in the order of the requests. `self.times` holds the run's seconds.

        Raises:
            RequestError: a request that cannot be served; nothing has run then.
        """
        capacity = self.config.capacity or fit_capacity(requests)
        info = self.decoder.target.info
        for i, request in enumerate(requests):
            try:
                request.check(info.vocab, capacity, info.max_context)
            except RequestError as error:
                raise RequestError(f"request {i}: {error}") from None
        if self.decoder.schedule is not None:
            self._check_stand_in(requests)
            self.price(capacity)
        run = _Run(self, list(requests), capacity, on_result)
        results = run.go()
        self.times = run.times()
        return results

    def price(self, capacity: int) -> None:
        """Know what a round costs before scheduling by it: read, or profiled once."""
        if self.weights.costs is not None or self.decoder.schedule is None:
            return
        if self.costs is None:
            self.costs = profile(self, capacity)
        most = self.decoder.schedule.widths[-1]
        self.weights = self.weights.replace(costs=jnp.asarray(self.costs.per_round(most)))

    def _check_confidences(self) -> None:
        """Refuse to schedule drafts that nobody is sure of."""
        head, k = self.decoder.head, self.decoder.num_speculative_tokens
        own = getattr(head, "has_confidence", False)
        if not own and not self.config.argmax_confidence:
            raise PairingError(
                f"this {head.name} head gives no confidences: Engine.verification"
                f" {self.config.verification!r} needs them, or Engine.argmax_confidence"
            )
        state = jax.eval_shape(lambda: init_state(self.decoder, 1, 2 * k + 2, "float32"))
        drafts = jax.eval_shape(
            lambda weights, state: rounds_module.propose(self.decoder, weights, state),
            self.weights,
            state,
        )
        if drafts.confidence is None:
            raise PairingError(
                f"the drafts of a {head.name} head have no probabilities to be sure by"
            )

    def _check_stand_in(self, requests: Sequence[Request]) -> None:
        """Refuse the argmax's probability where something else than the argmax is drafted."""
        own = getattr(self.decoder.head, "has_confidence", False)
        if own or self.decoder.greedy_drafts or not any(r.temperature > 0 for r in requests):
            return
        raise RequestError(
            "Engine.argmax_confidence holds for argmax drafts alone: ask greedily, or set"
            ' Engine.draft_sampling = "greedy"'
        )

    def prefill(self, request: Request, capacity: int) -> RoundState:
        """Return a batch-of-one state with the prompt taken in and the first token drawn."""
        state = _init_state(self.decoder, 1, capacity, self.cache_dtype)
        prompt = np.asarray(request.prompt_ids, np.int32)
        tokens = np.zeros((1, capacity), np.int32)
        tokens[0, : len(prompt)] = prompt
        state = state.replace(
            tokens=jnp.asarray(tokens),
            budget=jnp.asarray([request.max_new_tokens], jnp.int32),
            sampling=Sampling(
                temperature=jnp.asarray([request.temperature], jnp.float32),
                top_k=jnp.asarray([request.top_k], jnp.int32),
                top_p=jnp.asarray([request.top_p], jnp.float32),
                min_p=jnp.asarray([request.min_p], jnp.float32),
                seed=jnp.asarray([request.seed], jnp.uint32),
            ),
        )
        longest = self.config.prefill_chunk
        for start in range(0, len(prompt), longest):
            piece = prompt[start : start + longest]
            chunk = np.zeros((1, bucket(len(piece), longest)), np.int32)
            chunk[0, : len(piece)] = piece
            end = start + len(piece)
            following = int(prompt[end]) if end < len(prompt) else -1
            state = _prefill_chunk(
                self.decoder,
                self.weights,
                state,
                jnp.asarray(chunk),
                jnp.asarray([len(piece)], jnp.int32),
                jnp.asarray([following], jnp.int32),
            )
        return state


def _schedule_of(config: EngineConfig, num: int) -> Schedule | None:
    if config.verification == "fixed" or num == 0:
        return None
    return Schedule(
        kind=config.verification,
        threshold=config.confidence_threshold,
        widths=choose_widths(config.concurrency, num, config.verify_widths),
    )


class _Run:
    """One call of `generate`: the queue, the lanes and the clocks."""

    def __init__(
        self,
        engine: Engine,
        requests: list[Request],
        capacity: int,
        on_result: Callable[[Result], None] | None,
    ) -> None:
        self.engine, self.requests, self.capacity = engine, requests, capacity
        self.on_result = on_result
        self.queue = deque(range(len(requests)))
        lanes = engine.config.concurrency
        self.lane_request: list[int | None] = [None] * lanes
        self.started: dict[int, float] = {}
        self.first_token: dict[int, float] = {}
        self.results: dict[int, Result] = {}
        self.seconds = {"prefill": 0.0, "decode": 0.0, "total": 0.0}
        self.compile_clock = CompileClock()
        self.rounds = 0

    def go(self) -> list[Result]:
        engine = self.engine
        self.begin = time.perf_counter()
        with self.compile_clock:
            lanes = engine.config.concurrency
            state = _init_state(engine.decoder, lanes, self.capacity, engine.cache_dtype)
            limit = jnp.int32(engine.config.rounds_per_call)
            while self.queue or any(r is not None for r in self.lane_request):
                state = self._timed("prefill", self._refill, state)
                state, ran = self._timed(
                    "decode", _run_rounds, engine.decoder, engine.weights, state, limit
                )
                self.rounds += int(ran)
                self._collect(state)
        self.seconds["total"] = time.perf_counter() - self.begin
        return [self.results[i] for i in range(len(self.requests))]

    def _timed(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run to completion and book the seconds, those of compiling apart."""
        compiled, start = self.compile_clock.seconds, time.perf_counter()
        out = jax.block_until_ready(function(*args))
        spent = time.perf_counter() - start
        self.seconds[part] += spent - (self.compile_clock.seconds - compiled)
        return out

    def _now(self) -> float:
        """Seconds since the start, those of compiling left out."""
        return time.perf_counter() - self.begin - self.compile_clock.seconds

    def _refill(self, state: RoundState) -> RoundState:
        """Give every idle lane the next prompt of the queue."""
        for lane, taken in enumerate(self.lane_request):
            if taken is not None or not self.queue:
                continue
            index = self.queue.popleft()
            self.started[index] = self._now()
            single = self.engine.prefill(self.requests[index], self.capacity)
            state = _insert(self.engine.decoder, state, jnp.int32(lane), single)
            jax.block_until_ready(state.lengths)
            self.first_token[index] = self._now()
            self.lane_request[lane] = index
        return state

    def _collect(self, state: RoundState) -> None:
        """Read out the lanes that are done."""
        done = hosts.fetch(state.done)
        ended = [i for i, r in enumerate(self.lane_request) if r is not None and done[i]]
        if not ended:
            return
        read = (state.tokens, state.lengths, state.rounds, state.drafted, state.accepted)
        tokens, lengths, rounds, drafted, accepted = hosts.fetch(read)
        now = self._now()
        for lane in ended:
            index = self.lane_request[lane]
            assert index is not None
            prompt = len(self.requests[index].prompt_ids)
            ids = tuple(int(t) for t in tokens[lane, prompt : lengths[lane]])
            stopped = ids[-1] in self.engine.decoder.stop_ids
            result = Result(
                index=index,
                token_ids=ids,
                finish_reason="stop" if stopped else "length",
                rounds=int(rounds[lane]),
                drafted=tuple(int(n) for n in drafted[lane]),
                accepted=tuple(int(n) for n in accepted[lane]),
                first_token_seconds=self.first_token[index],
                finish_seconds=now,
                start_seconds=self.started[index],
            )
            self.results[index] = result
            self.lane_request[lane] = None
            if self.on_result is not None:
                self.on_result(result)

    def times(self) -> RunTimes:
        return RunTimes(
            total=self.seconds["total"],
            prefill=self.seconds["prefill"],
            decode=self.seconds["decode"],
            compile=self.compile_clock.seconds,
            rounds=self.rounds,
        )
