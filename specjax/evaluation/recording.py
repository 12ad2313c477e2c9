"""One run that sees what a head would draft everywhere, and a profile of what rounds cost.

The recorded run drafts and verifies the most tokens at every place, but keeps one token a round:
the next one, whatever became of the others. It so takes as many rounds as decoding without a head,
and knows at every place how many drafts a round that starts there accepts.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core.errors import DataError
from specjax.decode import engine as engine_module
from specjax.decode import round as stages
from specjax.decode.compiles import CompileClock
from specjax.decode.engine import Engine
from specjax.decode.placement import constrain
from specjax.decode.requests import Request
from specjax.decode.round import Decoder, RoundState, Weights
from specjax.evaluation.prediction import Recorded
from specjax.verify import verify

_REPEATS, _ROUNDS = 5, 6  # timings of each width, rounds in each


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(
    decoder: Decoder, weights: Weights, state: RoundState
) -> tuple[RoundState, tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]]:
    """Run a round, keep its first token: (state, (accepted, width, confidence, done))."""
    proposal = stages.propose(decoder, weights, state)
    width, _ = stages.schedule(decoder, weights, state, proposal)
    inputs, out, logits = stages.forward(decoder, weights, state, proposal, width)
    verdict = verify(logits, proposal.tokens, proposal.probs, width, state.sampling, state.lengths)
    # Accepted draft or correction, the first token is the target's all the same.
    first = verdict.replace(accepted=jnp.zeros_like(verdict.accepted))
    start = jnp.maximum(state.lengths - 1, 0)
    after, emitted = stages.commit(decoder, state, out, first)
    head_state = stages.observe(
        decoder, weights, state.head, inputs, out, verdict.tokens, emitted, start
    )
    after = constrain(decoder.layout, after.replace(head=head_state), len(state.lengths))
    return after, (verdict.accepted, width, proposal.confidence, after.done)


def record(
    engine: Engine,
    requests: Sequence[Request],
    confident: bool,
    on_answer: Callable[[], None] = lambda: None,
) -> tuple[Recorded, RoundState]:
    """Answer the requests one token a round.

    Args:
        engine: of the most drafts, all verified; its capacity is set.
        requests: the prompts.
        confident: keep the head's confidences.
        on_answer: called behind each answer.

    Returns:
        The record, and the state behind the first filling of the lanes, to profile with.

    Raises:
        DataError: all answers end with their first token.
    """
    lanes, capacity = engine.config.concurrency, engine.config.capacity
    queue, taken = deque(range(len(requests))), [-1] * lanes
    rows: list[list[tuple[np.ndarray, ...]]] = [[] for _ in requests]
    state = engine_module._init_state(engine.decoder, lanes, capacity, engine.cache_dtype)
    filled: RoundState | None = None
    prefill = 0.0
    while queue or max(taken) >= 0:
        while queue and min(taken) < 0:
            index, lane = queue.popleft(), taken.index(-1)
            seconds, single = _timed_prefill(engine, requests[index])
            prefill += seconds
            if bool(single.done[0]):
                on_answer()
                continue
            state = engine_module._insert(engine.decoder, state, jnp.int32(lane), single)
            taken[lane] = index
        if max(taken) < 0:
            break
        if filled is None:
            filled = jax.tree.map(jnp.copy, state)
        state, seen = _step(engine.decoder, engine.weights, state)
        accepted, width, sure, done = jax.device_get(seen)
        for lane, index in enumerate(taken):
            if index < 0:
                continue
            kept = (sure[lane],) if confident else ()
            rows[index].append((accepted[lane], width[lane], *kept))
            if done[lane]:
                taken[lane] = -1
                on_answer()
    if filled is None:
        raise DataError("every answer ends with its first token: there is nothing to tune")
    return _packed(rows, prefill), filled


def time_rounds(
    engines: Mapping[int, Engine],
    filled: RoundState,
    on_width: Callable[[], None] = lambda: None,
) -> dict[int, float]:
    """Return the seconds of a round by number of drafts, measured in alternation.

    Args:
        engines: by number of drafts, 0 included; all with caches of one length.
        filled: see `record`.
        on_width: called behind each timing, the first of which compiles.
    """
    starts = {k: _fitted(filled, engine) for k, engine in engines.items()}
    seconds: dict[int, list[float]] = {k: [] for k in engines}
    for _ in range(_REPEATS + 1):
        for k, engine in engines.items():
            state = jax.block_until_ready(jax.tree.map(jnp.copy, starts[k]))
            begin = time.perf_counter()
            _, ran = jax.block_until_ready(
                engine_module._run_rounds(engine.decoder, engine.weights, state, jnp.int32(_ROUNDS))
            )
            seconds[k].append((time.perf_counter() - begin) / int(ran))
            on_width()
    return {k: statistics.median(found[1:]) for k, found in seconds.items()}


def _timed_prefill(engine: Engine, request: Request) -> tuple[float, RoundState]:
    with CompileClock() as clock:
        begin = time.perf_counter()
        single = jax.block_until_ready(engine.prefill(request, engine.config.capacity))
        return time.perf_counter() - begin - clock.seconds, single


def _fitted(state: RoundState, engine: Engine) -> RoundState:
    """Return a state as an engine of fewer drafts has it, whose capacity is so much larger."""
    k, capacity = engine.config.num_speculative_tokens, engine.config.capacity
    lanes, length = state.tokens.shape
    zeros = jnp.zeros((lanes, k), jnp.int32)
    head = state.head if k else engine.decoder.head.init_state(lanes, 0, engine.cache_dtype)
    return state.replace(
        head=head,
        tokens=jnp.pad(state.tokens, ((0, 0), (0, capacity - length))),
        drafted=zeros,
        accepted=zeros,
        survival=zeros.astype(jnp.float32),
    )


def _packed(rows: Sequence[Sequence[tuple[np.ndarray, ...]]], prefill: float) -> Recorded:
    longest = max(map(len, rows))
    columns = len(next(row for row in rows if row)[0])

    def column(which: int) -> np.ndarray:
        like = np.asarray(next(row for row in rows if row)[0][which])
        full = np.zeros((len(rows), longest, *like.shape), like.dtype)
        for i, row in enumerate(rows):
            if row:
                full[i, : len(row)] = [place[which] for place in row]
        return full

    return Recorded(
        tokens=np.asarray([1 + len(row) for row in rows]),
        accepted=column(0),
        room=column(1),
        confidence=column(2) if columns > 2 else None,
        prefill_seconds=prefill,
    )
