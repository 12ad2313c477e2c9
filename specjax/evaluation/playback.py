"""Decoding again, a round at a time, so that what was drafted can be seen.

The rounds are the engine's own. Before each of them the head is asked for its drafts once more, in
a program of its own: the round itself does not keep them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from specjax.core import hosts
from specjax.decode import engine as engine_module
from specjax.decode import round as stages
from specjax.decode.engine import Engine, fit_capacity
from specjax.decode.requests import Request

propose = functools.partial(jax.jit, static_argnums=0)(stages.propose)
"""The head's drafts of a round, as a program of their own."""


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one request; its prompt pass is the first, with no drafts.

    Attributes:
        request: index of the request.
        emitted: ids written: the accepted drafts, then the target's own token.
        drafts: `[K]` ids drafted.
        proposed: how many of the drafts the head meant.
        verified: how many had their chance.
        accepted: how many stood.
        confidence: `[K]` of the drafts, where the head has any.
    """

    request: int
    emitted: tuple[int, ...]
    drafts: Int[np.ndarray, " K"]
    proposed: int
    verified: int
    accepted: int
    confidence: Float[np.ndarray, " K"] | None


def filled(engine: Engine, requests: Sequence[Request], capacity: int) -> stages.RoundState:
    """Return lanes with the prompts of requests taken in; lanes without one are idle.

    Args:
        engine: what decodes.
        requests: at most as many as there are lanes.
        capacity: room of each lane.
    """
    lanes = engine.config.concurrency
    state = engine_module._init_state(engine.decoder, lanes, capacity, engine.cache_dtype)
    for lane, request in enumerate(requests):
        single = engine.prefill(request, capacity)
        state = engine_module._insert(engine.decoder, state, jnp.int32(lane), single)
    return state


def play(
    engine: Engine,
    requests: Sequence[Request],
    on_batch: Callable[[int], None] | None = None,
) -> Iterator[Round]:
    """Decode requests, as many at a time as there are lanes, and yield every round.

    Args:
        engine: what decodes.
        requests: the prompts.
        on_batch: called with the number of requests done.
    """
    lanes, capacity = engine.config.concurrency, engine.config.capacity or fit_capacity(requests)
    engine.price(capacity)  # a schedule weighs costs
    decoder, weights = engine.decoder, engine.weights
    for first in range(0, len(requests), lanes):
        batch = range(first, min(first + lanes, len(requests)))
        state = filled(engine, requests[first : first + lanes], capacity)
        before = _Seen(state)
        for lane, i in enumerate(batch):
            at = len(requests[i].prompt_ids)
            given = tuple(int(t) for t in before.tokens[lane, at : before.lengths[lane]])
            yield Round(i, given, np.zeros(0, np.int32), 0, 0, 0, None)
        while not before.done.all():
            proposal = hosts.fetch(propose(decoder, weights, state))
            state, _ = engine_module._run_rounds(decoder, weights, state, jnp.int32(1))
            after = _Seen(state)
            for lane, i in enumerate(batch):
                if before.done[lane]:
                    continue
                written = after.tokens[lane, before.lengths[lane] : after.lengths[lane]]
                sure, count = proposal.confidence, proposal.count
                drafts = proposal.tokens[lane]
                yield Round(
                    request=i,
                    emitted=tuple(int(t) for t in written),
                    drafts=drafts,
                    proposed=len(drafts) if count is None else int(count[lane]),
                    verified=int(after.drafted[lane] - before.drafted[lane]),
                    accepted=int(after.accepted[lane] - before.accepted[lane]),
                    confidence=None if sure is None else sure[lane],
                )
            before = after
        if on_batch is not None:
            on_batch(batch[-1] + 1)


class _Seen:
    """What the host reads of a state: texts, and how many drafts were verified and accepted."""

    def __init__(self, state: stages.RoundState) -> None:
        read = (state.tokens, state.lengths, state.done, state.drafted, state.accepted)
        self.tokens, self.lengths, self.done, drafted, accepted = hosts.fetch(read)
        self.drafted, self.accepted = drafted.sum(axis=1), accepted.sum(axis=1)
