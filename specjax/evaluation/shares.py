"""Where the time of a round goes: its stages compiled apart and timed on states of a real run.

One stage compiled alone cannot overlap or fuse with the next, so the sum of the stages is always
shown beside the time of the whole round.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decode import engine as engine_module
from specjax.decode import round as stages
from specjax.decode.engine import Engine, fit_capacity
from specjax.decode.placement import constrain
from specjax.decode.requests import Request
from specjax.decode.round import Decoder, RoundState, Weights
from specjax.evaluation.playback import filled, propose
from specjax.heads.base import Proposal
from specjax.targets.base import TargetOut
from specjax.verify import Verdict, verify

PyTree = Any


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """Median seconds of the stages of one round.

    Attributes:
        propose: drafting.
        forward: the target's pass over the anchor and the drafts, logits included.
        commit: the verdict, and writing cache, tokens and counters.
        observe: the head's taking in of the committed positions.
        fused: the round as the engine runs it.
        rounds: how many recorded states were timed.
    """

    propose: float
    forward: float
    commit: float
    observe: float
    fused: float
    rounds: int

    @property
    def total(self) -> float:
        """Sum of the stages, to be read beside `fused`."""
        return self.propose + self.forward + self.commit + self.observe

    @property
    def draft_share(self) -> float:
        """Share of everything that the head does."""
        return (self.propose + self.observe) / self.total

    @property
    def verify_share(self) -> float:
        """Share of the target's pass."""
        return self.forward / self.total

    @property
    def other_share(self) -> float:
        """Share of the verdict and of writing it down."""
        return self.commit / self.total


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    decoder: Decoder, weights: Weights, state: RoundState, proposal: Proposal
) -> tuple[jax.Array, jax.Array, TargetOut, jax.Array]:
    width, _ = stages.schedule(decoder, weights, state, proposal)
    return width, *stages.forward(decoder, weights, state, proposal, width)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _commit(
    decoder: Decoder,
    state: RoundState,
    proposal: Proposal,
    width: jax.Array,
    out: TargetOut,
    logits: jax.Array,
) -> tuple[RoundState, jax.Array, jax.Array, Verdict]:
    start = jnp.maximum(state.lengths - 1, 0)
    verdict = verify(logits, proposal.tokens, proposal.probs, width, state.sampling, state.lengths)
    after, emitted = stages.commit(decoder, state, out, verdict)
    after = constrain(decoder.layout, after, len(start))
    return after, start, emitted, verdict


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _observe(
    decoder: Decoder,
    weights: Weights,
    head_state: PyTree,
    inputs: jax.Array,
    out: TargetOut,
    emitted: jax.Array,
    start: jax.Array,
    verdict: Verdict,
) -> PyTree:
    after = stages.observe(
        decoder, weights, head_state, inputs, out, verdict.tokens, emitted, start
    )
    return constrain(decoder.layout, after, len(start))


class _Clock:
    """Collects seconds by name; each call is waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        out = jax.block_until_ready(function(*args))
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return out

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name][1:])  # the first call compiles


def staged_round(engine: Engine, state: RoundState, clock: _Clock) -> RoundState:
    """Run one round stage by stage; the state is used up."""
    decoder, weights = engine.decoder, engine.weights
    proposal = clock.run("propose", propose, decoder, weights, state)
    width, inputs, out, logits = clock.run("forward", _forward, decoder, weights, state, proposal)
    head_state, rest = state.head, state.replace(head=())
    after, start, emitted, verdict = clock.run(
        "commit", _commit, decoder, rest, proposal, width, out, logits
    )
    head_state = clock.run(
        "observe", _observe, decoder, weights, head_state, inputs, out, emitted, start, verdict
    )
    return after.replace(head=head_state)


def time_stages(engine: Engine, requests: Sequence[Request], most: int = 24) -> StageTimes | None:
    """Decode the first requests stage by stage, and each state's round fused as well.

    Args:
        engine: with all lanes to be filled from the first requests; fewer requests than lanes
            are repeated.
        requests: the run's requests.
        most: rounds to time; fewer where a lane ends earlier.

    Returns:
        The medians, or None where the first requests end before a round can be timed.
    """
    lanes = engine.config.concurrency
    chosen = [requests[i % len(requests)] for i in range(lanes)]
    capacity = engine.config.capacity or fit_capacity(requests)
    engine.price(capacity)  # a schedule weighs costs
    state = filled(engine, chosen, capacity)
    clock = _Clock()
    timed = 0
    # One more than asked: the first round compiles and is not counted.
    while timed <= most and not bool(state.done.any()):
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        clock.run(
            "fused",
            engine_module._run_rounds,
            engine.decoder,
            engine.weights,
            copy,
            jnp.int32(1),
        )
        state = staged_round(engine, state, clock)
        timed += 1
    if timed < 2:
        return None
    return StageTimes(
        propose=clock.median("propose"),
        forward=clock.median("forward"),
        commit=clock.median("commit"),
        observe=clock.median("observe"),
        fused=clock.median("fused"),
        rounds=timed - 1,
    )
