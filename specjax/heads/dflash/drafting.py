"""A round of drafting: one pass over a block, then, in DSpark, its slots from left to right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.errors import ConfigError
from specjax.heads.base import Borrowed, DraftContext, Proposal
from specjax.heads.chain import draft_chain
from specjax.heads.dflash import sequential
from specjax.heads.dflash.confidence import calibrated, confidence_logits
from specjax.heads.dflash.network import (
    DFlashWeights,
    base_logits,
    embed_slots,
    run_slots,
    sees_slots,
)
from specjax.heads.vocabulary import kept_ids
from specjax.layers.attention import KeyBlock
from specjax.layers.linear import linear_f32

if TYPE_CHECKING:
    from specjax.heads.dflash.head import DFlashHead, DFlashState


@struct.dataclass
class DraftPass:
    """What a round computed on the way to its proposal.

    Attributes:
        hidden: `[B, b, H]` all slots after the final norm.
        base_logits: `[B, K, Vd]` of the drafting slots, before the sequential head.
        logits: `[B, K, Vd]` that the drafts were picked from.
        previous: `[B, K]` token before each draft, in target ids.
        confidence_logits: `[B, K]`, None without a confidence head.
    """

    hidden: Float[Array, "B b H"]
    base_logits: Float[Array, "B K Vd"]
    logits: Float[Array, "B K Vd"]
    previous: Int[Array, "B K"]
    confidence_logits: Float[Array, "B K"] | None


def draft(
    head: DFlashHead,
    params: DFlashWeights,
    borrowed: Borrowed,
    state: DFlashState,
    context: DraftContext,
    num: int,
) -> tuple[Proposal, DraftPass | None]:
    """Draft the first `num` tokens of a block.

    Args:
        head: what it is.
        params: its weights.
        borrowed: the target's embedding and output layer.
        state: the committed context.
        context: of the round.
        num: drafts per row.

    Returns:
        (proposal, what was computed on the way; None without drafts).

    Raises:
        ConfigError: more drafts than a block has.
    """
    if num > head.max_tokens:
        raise ConfigError(
            f"{num} drafts from a block of {head.config.block_size} slots, which gives at most"
            f" {head.max_tokens}"
        )
    if num == 0:
        return Proposal(tokens=jnp.zeros((context.anchor.shape[0], 0), jnp.int32)), None
    hidden = run_block(head, params, borrowed, state, context.anchor)
    drafting = hidden[:, head.first_slot : head.first_slot + num]
    base = base_logits(head, params, borrowed, drafting)
    pick = _sequential(head, params, hidden, base, context.anchor)
    previous, seen = [context.anchor], [pick(0, context.anchor)]

    def advance(k: int, token: jax.Array) -> jax.Array:
        previous.append(token)
        seen.append(pick(k + 1, token))
        return seen[-1]

    proposal = draft_chain(
        lambda: seen[0],
        advance,
        num,
        context,
        vocab=head.vocab,
        kept=kept_ids(params),
        point_mass=head.config.greedy_drafts,
    )
    before, judged = jnp.stack(previous, axis=1), None
    if head.config.confidence:
        judged = confidence_logits(head, params, drafting, before)
        confidence = calibrated(judged, head.temperatures)
        proposal = dataclasses.replace(proposal, confidence=confidence)
    return proposal, DraftPass(hidden, base, jnp.stack(seen, axis=1), before, judged)


def run_block(
    head: DFlashHead,
    params: DFlashWeights,
    borrowed: Borrowed,
    state: DFlashState,
    anchor: Int[Array, " B"],
) -> Float[Array, "B b H"]:
    """Run a whole block over the committed context.

    All of it, however few drafts are wanted: slots see each other in both directions.
    """
    size = head.config.block_size
    masks = jnp.full((anchor.shape[0], size - 1), head.config.mask_token_id, jnp.int32)
    tokens = jnp.concatenate([anchor[:, None].astype(jnp.int32), masks], axis=1)
    positions = state.lengths[:, None] + jnp.arange(size)[None]
    # A window counts back from each slot, or for all of them from the place before the anchor.
    asking = state.lengths[:, None] - 1 if head.window_from_anchor else positions

    def visible(layer: int, own: tuple[jax.Array, jax.Array]) -> list[KeyBlock]:
        cached = head.cache(layer).read(state.layers[layer], state.lengths, asking)
        k, v = (x.astype(cached.k.dtype) for x in own)  # one dtype, the context's
        return [cached, KeyBlock(k, v, sees_slots(head, layer)[None])]

    slots = embed_slots(head, params, borrowed, tokens)
    return run_slots(head, params, slots, positions, visible)


def _sequential(
    head: DFlashHead,
    params: DFlashWeights,
    hidden: Float[Array, "B b H"],
    base: Float[Array, "B K Vd"],
    anchor: Int[Array, " B"],
) -> Callable[[int, jax.Array], jax.Array]:
    """Return the function (draft, token before it) to the logits it is picked from.

    To be called for each draft in order: a recurrent head goes on from the slot before.
    """
    weights = params.markov
    if weights is None:
        return lambda k, token: base[:, k]
    prepared = sequential.prepare(head, weights, hidden)
    state = sequential.initial_state(head, anchor.shape)

    def through(slot: int, token: jax.Array) -> jax.Array:
        nonlocal state
        part = None if prepared is None else prepared[:, slot]
        given, state = sequential.step(head, weights, part, state, token)
        return given

    def pick(k: int, token: jax.Array) -> jax.Array:
        return base[:, k] + linear_f32(through(head.first_slot + k, token), weights.w2)

    for slot in range(head.first_slot):  # a slot that drafts nothing passes its state on
        through(slot, anchor)
    return pick
