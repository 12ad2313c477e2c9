"""Drafting one token after another: the loop that recurrent heads share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.heads.base import DraftContext, Proposal
from specjax.layers.sampling import PURPOSE_DRAFT, draw


def draft_chain(
    first: Callable[[], jax.Array],
    advance: Callable[[int, jax.Array], jax.Array],
    num: int,
    context: DraftContext,
    *,
    vocab: int,
    kept: Int[Array, " Vd"] | None = None,
    point_mass: bool = False,
) -> Proposal:
    """Draft `num` tokens per row, each from logits that saw the one before.

    The loop is unrolled: a round drafts few tokens, and unrolled steps keep no buffer in a carry.

    Args:
        first: gives the logits `[B, V or Vd]` of the first draft.
        advance: (k, target ids `[B]` of draft k) to the logits of draft k + 1.
        num: drafts per row; 0 calls neither function.
        context: of the round.
        vocab: size V of the target's vocabulary.
        kept: target id of each draft id, None where drafts are target ids already.
        point_mass: take the most probable token in sampled rows too.

    Returns:
        Tokens in target ids. Probabilities are over the target's vocabulary; they are zeros where
        no row of the batch samples, and None with `point_mass` or without drafts. Confidences are
        the argmax's probabilities, which mean something where it is what was drafted.
    """
    batch = context.anchor.shape[0]
    if num == 0:
        return Proposal(tokens=jnp.zeros((batch, 0), jnp.int32))
    logits = first()
    tokens: list[jax.Array] = []
    drawn_from: list[jax.Array] = []
    best: list[jax.Array] = []
    for k in range(num):
        if point_mass:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            position = context.position + 1 + k
            token, probs = draw(logits, context.sampling, position, PURPOSE_DRAFT + k)
            drawn_from.append(probs)
        # Costs nothing where nobody asks: the round is one program, and this then is dead code.
        best.append(jnp.exp(jnp.max(logits, -1) - jax.nn.logsumexp(logits, -1)))
        # A draft id must become a target id before anyone embeds or verifies it.
        tokens.append(token if kept is None else kept[token])
        if k + 1 < num:
            logits = advance(k, tokens[-1])
    stacked = jnp.stack(tokens, axis=1)
    if point_mass:
        return Proposal(tokens=stacked, confidence=jnp.stack(best, axis=1))
    probs = jnp.stack(drawn_from, axis=1)
    if kept is not None:
        probs = jax.lax.cond(
            jnp.any(context.sampling.sampled),
            lambda: spread(probs, kept, vocab),
            lambda: jnp.zeros((batch, num, vocab), jnp.float32),
        )
    return Proposal(tokens=stacked, probs=probs, confidence=jnp.stack(best, axis=1))


def spread(
    probs: Float[Array, "*B Vd"], kept: Int[Array, " Vd"], vocab: int
) -> Float[Array, "*B V"]:
    """Put draft-vocabulary probabilities where their target ids are, zeros elsewhere."""
    empty = jnp.zeros((*probs.shape[:-1], vocab), probs.dtype)
    return empty.at[..., kept].set(probs, unique_indices=True)
