"""One decode round: propose, schedule, forward, verify, commit, observe.

The round is a pure function of weights and `RoundState`; `rounds` runs it under
`lax.while_loop` until a lane ends. Baseline decoding is the same function with the null head.
Rows advance by their own accepted lengths; nothing rejected is ever written, so nothing is ever
rolled back.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.core.sharding import Layout
from specjax.core.stack import Stacked
from specjax.decode.placement import constrain
from specjax.decode.schedule import Schedule, admit, run_scheduled, run_width
from specjax.heads.base import (
    DraftContext,
    Head,
    Observation,
    Proposal,
    borrow,
    longest_context,
)
from specjax.layers.sampling import PURPOSE_NEXT, Sampling, draw
from specjax.targets.base import Cache, Target, TargetOut
from specjax.verify import Verdict, contains_stop, cut_at_stop, tally, verify

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static half of a decode program: what runs. The weights are arguments.

    Attributes:
        target: the model that decides.
        head: the model that drafts.
        num_speculative_tokens: drafts per round (K).
        stop_ids: tokens that end a text.
        greedy_drafts: draft the head's argmax whatever the request's sampling.
        schedule: which drafts are verified; None verifies all.
        layout: of what is carried on, on a mesh; None on one device.
    """

    target: Target
    head: Head
    num_speculative_tokens: int
    stop_ids: tuple[int, ...]
    greedy_drafts: bool = False
    schedule: Schedule | None = None
    layout: Layout | None = None


@struct.dataclass
class Weights:
    """The array half: weights of target and head, and what verifying costs.

    Attributes:
        target: the target's.
        head: the head's.
        costs: `[B (K + 1)]` seconds of a round by tokens verified, where that is scheduled.
    """

    target: PyTree
    head: PyTree
    costs: Float[Array, " M"] | None = None


@struct.dataclass
class RoundState:
    """Everything that a decode round carries on; lanes are on axis 0 of every leaf.

    In caches of scanned layers (`core.stack.Stacked`) the layers come first, then the lanes.

    Attributes:
        cache: the target's cache. Its length is always `lengths - 1`: the anchor's state does
            not exist yet.
        head: the head's state.
        tokens: `[B, S]` prompt and generated ids, right padded.
        lengths: `[B]` tokens so far; the last one is the anchor.
        budget: `[B]` tokens that may still be generated.
        done: `[B]` nothing more to do in this lane.
        sampling: how each lane samples.
        drafted: `[B, K]` drafts verified, per position.
        accepted: `[B, K]` drafts accepted and emitted, per position.
        rounds: `[B]` rounds that the lane took part in.
        survival: `[B, K]` how likely the last round's drafts were to stand, under a schedule.
    """

    cache: Cache
    head: PyTree
    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    budget: Int[Array, " B"]
    done: Bool[Array, " B"]
    sampling: Sampling
    drafted: Int[Array, "B K"]
    accepted: Int[Array, "B K"]
    rounds: Int[Array, " B"]
    survival: Float[Array, "B K"]


def init_state(decoder: Decoder, batch: int, capacity: int, cache_dtype: str) -> RoundState:
    """Return a state of `batch` idle lanes with room for `capacity` tokens each.

    The caches are longer by the K + 1 positions of a verify pass.
    """
    k = decoder.num_speculative_tokens
    room = capacity + k + 1
    zeros = jnp.zeros((batch,), jnp.int32)
    state = RoundState(
        cache=decoder.target.init_cache(batch, room, cache_dtype),
        head=decoder.head.init_state(batch, room, cache_dtype),
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        lengths=zeros,
        budget=zeros,
        done=jnp.ones((batch,), bool),
        sampling=Sampling.of(batch),
        drafted=jnp.zeros((batch, k), jnp.int32),
        accepted=jnp.zeros((batch, k), jnp.int32),
        rounds=zeros,
        survival=jnp.zeros((batch, k), jnp.float32),
    )
    return constrain(decoder.layout, state, batch)


def propose(decoder: Decoder, weights: Weights, state: RoundState) -> Proposal:
    """Draft K tokens per lane."""
    anchor_at = jnp.maximum(state.lengths - 1, 0)
    sampling = state.sampling
    if decoder.greedy_drafts:
        sampling = sampling.replace(temperature=jnp.zeros_like(sampling.temperature))
    context = DraftContext(
        anchor=jnp.take_along_axis(state.tokens, anchor_at[:, None], axis=1)[:, 0],
        position=anchor_at,
        tokens=state.tokens,
        lengths=state.lengths,
        sampling=sampling,
        keys=decoder.target.entries(state.cache.layers, decoder.head.reads),
    )
    k = decoder.num_speculative_tokens
    borrowed = borrow(decoder.target, weights.target)
    proposal = decoder.head.propose(weights.head, borrowed, state.head, context, k)
    return proposal.replace(probs=None) if decoder.greedy_drafts else proposal


def schedule(
    decoder: Decoder, weights: Weights, state: RoundState, proposal: Proposal
) -> tuple[Int[Array, " B"], Float[Array, "B K"]]:
    """Return (drafts that each lane verifies, this round's survivals).

    All K, or what the budget leaves room for, unless a schedule says less; none where the head had
    nothing to say, or the text has outgrown the head.
    """
    width = jnp.minimum(decoder.num_speculative_tokens, state.budget - 1)
    if proposal.count is not None:
        width = jnp.minimum(width, proposal.count)
    if (longest := longest_context(decoder.head)) is not None:
        width = jnp.minimum(width, longest - state.lengths)
    width = jnp.where(state.done, 0, jnp.maximum(width, 0))
    if decoder.schedule is None:
        return width, state.survival
    assert proposal.confidence is not None and weights.costs is not None  # the engine checks
    return admit(
        decoder.schedule, proposal.confidence, width, ~state.done, weights.costs, state.survival
    )


def verify_inputs(state: RoundState, proposal: Proposal) -> Int[Array, "B T"]:
    """Return what the target reads: the anchor and all drafts."""
    anchor_at = jnp.maximum(state.lengths - 1, 0)[:, None]
    anchor = jnp.take_along_axis(state.tokens, anchor_at, axis=1)
    return jnp.concatenate([anchor, proposal.tokens], axis=1)


def forward(
    decoder: Decoder, weights: Weights, state: RoundState, proposal: Proposal, width: jax.Array
) -> tuple[Int[Array, "B T"], TargetOut, jax.Array]:
    """Run the target over [anchor, drafts]: (its inputs, its output, logits `[B, K + 1, V]`)."""
    inputs = verify_inputs(state, proposal)
    valid = jnp.where(state.done, 0, width + 1)
    run = (
        functools.partial(run_width, size=inputs.size)
        if decoder.schedule is None
        else functools.partial(run_scheduled, decoder.schedule)
    )
    taps = decoder.head.taps
    return inputs, *run(decoder.target, weights.target, inputs, valid, state.cache, taps)


def commit(
    decoder: Decoder,
    state: RoundState,
    out: TargetOut,
    verdict: Verdict,
) -> tuple[RoundState, Int[Array, " B"]]:
    """Write what was accepted: caches, tokens, counters. Returns (state, tokens emitted `[B]`).

    A lane commits as many positions as it emits tokens, so that its last emitted token is the
    next anchor.
    """
    emitted = cut_at_stop(
        verdict.tokens, verdict.accepted, decoder.stop_ids, state.budget, state.done
    )
    stopped = contains_stop(verdict.tokens, emitted, decoder.stop_ids)
    kept, proposed = tally(verdict.accepted, verdict.admitted, emitted)
    slot = jnp.arange(state.drafted.shape[1])[None]
    step = jnp.arange(verdict.tokens.shape[1])[None]
    capacity = state.tokens.shape[1]
    at = jnp.where(step < emitted[:, None], state.lengths[:, None] + step, capacity + step)
    tokens = jax.vmap(lambda row, i, new: row.at[i].set(new, mode="drop", unique_indices=True))(
        state.tokens, at, verdict.tokens
    )
    budget = state.budget - emitted
    running = ~state.done
    return (
        state.replace(
            cache=decoder.target.commit(state.cache, out.update, emitted),
            tokens=tokens,
            lengths=state.lengths + emitted,
            budget=budget,
            done=state.done | stopped | (budget <= 0),
            drafted=state.drafted + (running[:, None] & (slot < proposed[:, None])),
            accepted=state.accepted + (running[:, None] & (slot < kept[:, None])),
            rounds=state.rounds + running,
        ),
        emitted,
    )


def observe(
    decoder: Decoder,
    weights: Weights,
    head_state: PyTree,
    inputs: Int[Array, "B T"],
    out: TargetOut,
    next_tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    start: Int[Array, " B"],
) -> PyTree:
    """Hand the head the true states of the positions that were committed."""
    seen = Observation(
        tokens=inputs,
        next_tokens=next_tokens,
        hidden=out.hidden,
        taps=out.taps,
        count=count,
        start=start,
    )
    return decoder.head.observe(
        weights.head, borrow(decoder.target, weights.target), head_state, seen
    )


def one_round(decoder: Decoder, weights: Weights, state: RoundState) -> RoundState:
    """Run one round over all lanes; lanes that are done do not change."""
    with jax.named_scope("propose"):
        proposal = propose(decoder, weights, state)
    width, survival = schedule(decoder, weights, state, proposal)
    with jax.named_scope("forward"):
        inputs, out, logits = forward(decoder, weights, state, proposal, width)
    with jax.named_scope("verify"):
        verdict = verify(
            logits, proposal.tokens, proposal.probs, width, state.sampling, state.lengths
        )
    with jax.named_scope("commit"):
        after, emitted = commit(decoder, state, out, verdict)
    with jax.named_scope("observe"):
        start = jnp.maximum(state.lengths - 1, 0)
        head_state = observe(
            decoder, weights, state.head, inputs, out, verdict.tokens, emitted, start
        )
    after = after.replace(head=head_state, survival=survival)
    return constrain(decoder.layout, after, len(state.lengths))


def rounds(
    decoder: Decoder, weights: Weights, state: RoundState, limit: Int[Array, ""]
) -> tuple[RoundState, Int[Array, ""]]:
    """Run rounds until a lane that was running is done, at most `limit`.

    Returns:
        (state, number of rounds run).
    """
    running = ~state.done

    def go_on(carry: tuple[jax.Array, RoundState]) -> jax.Array:
        ran, now = carry
        return jnp.any(running) & ~jnp.any(running & now.done) & (ran < limit)

    def body(carry: tuple[jax.Array, RoundState]) -> tuple[jax.Array, RoundState]:
        ran, now = carry
        return ran + 1, one_round(decoder, weights, now)

    ran, state = jax.lax.while_loop(go_on, body, (jnp.int32(0), state))
    return state, ran


def prefill_chunk(
    decoder: Decoder,
    weights: Weights,
    state: RoundState,
    chunk: Int[Array, "B C"],
    valid: Int[Array, " B"],
    following: Int[Array, " B"],
) -> RoundState:
    """Take a right-padded piece of the prompts into caches and head state.

    Args:
        decoder: what runs.
        weights: its weights.
        state: lanes whose `tokens` hold the whole prompts, `lengths` the tokens before the
            chunk plus one (that is, the first token of the chunk stands at the anchor's place).
        chunk: `[B, C]` the next tokens of each prompt.
        valid: `[B]` how many of them are real.
        following: `[B]` the prompt token behind the chunk; -1 where the prompt ends with it: the
            target then draws the first token of the answer, which becomes the anchor.
    """
    target = decoder.target
    out = target.forward(weights.target, chunk, valid, state.cache, decoder.head.taps)
    last = jnp.maximum(valid - 1, 0)
    state_at_last = jnp.take_along_axis(out.hidden, last[:, None, None], axis=1)[:, 0]
    ends = following < 0
    # Only the last position needs the output layer.
    position = state.cache.lengths + valid
    drawn, _ = draw(
        target.logits(weights.target, state_at_last), state.sampling, position, PURPOSE_NEXT
    )
    token = jnp.where(ends, drawn, following)
    shifted = jnp.concatenate([chunk[:, 1:], jnp.zeros_like(chunk[:, :1])], axis=1)
    is_last = jnp.arange(chunk.shape[1])[None] == last[:, None]
    next_tokens = jnp.where(is_last, token[:, None], shifted)
    start = state.cache.lengths
    # Tied to this call's logits, so that XLA writes the cache behind its last read.
    count = jnp.where(drawn < 0, 0, valid)
    cache = target.commit(state.cache, out.update, count)
    head_state = observe(decoder, weights, state.head, chunk, out, next_tokens, count, start)
    emitted = (ends & (valid > 0)).astype(jnp.int32)
    at = jnp.where(emitted > 0, position, state.tokens.shape[1])
    tokens = jax.vmap(lambda row, i, new: row.at[i].set(new, mode="drop"))(state.tokens, at, token)
    budget = state.budget - emitted
    stopped = contains_stop(token[:, None], emitted, decoder.stop_ids)
    after = state.replace(
        cache=cache,
        head=head_state,
        tokens=tokens,
        lengths=cache.lengths + 1,
        budget=budget,
        done=stopped | (budget <= 0),
    )
    return constrain(decoder.layout, after, len(state.lengths))


def insert(
    decoder: Decoder, state: RoundState, lane: Int[Array, ""], single: RoundState
) -> RoundState:
    """Put a prefilled batch of one into lane `lane`; nothing of the old lane remains."""

    def put(all_lanes: PyTree, one: PyTree) -> PyTree:
        if isinstance(all_lanes, Stacked):  # caches of scanned layers: layers first, then lanes
            return jax.tree.map(lambda a, b: at_axis(a, b, 1), all_lanes, one)
        return at_axis(all_lanes, one, 0)

    def at_axis(all_lanes: jax.Array, one: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(
            all_lanes, one.astype(all_lanes.dtype), lane, axis
        )

    after = jax.tree.map(put, state, single, is_leaf=lambda leaf: isinstance(leaf, Stacked))
    return constrain(decoder.layout, after, len(state.lengths))
