"""Rejection sampling: drafts from q, output distributed exactly as the target's p.

Draft k is accepted with probability min(1, p(d)/q(d)). The first rejected position draws from
what q leaves uncovered, max(p - q, 0) normalised; behind the last judged draft the token comes
from p itself. The pure functions below take the uniform numbers and distributions explicitly;
`rejection` adds logits, options and keys. T is K + 1 throughout.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.layers.sampling import (
    PURPOSE_ACCEPT,
    PURPOSE_NEXT,
    Sampling,
    choose,
    keys_at,
    processed_probs,
    uniforms,
)
from specjax.verify.emit import Verdict, prefix_length, verdict

SMALLEST = 1e-8
"""Smallest draft probability divided by, and smallest residual mass drawn from."""


def rejection(
    target_logits: Float[Array, "B T V"],
    draft_tokens: Int[Array, "B K"],
    draft_probs: Float[Array, "B K V"] | None,
    width: Int[Array, " B"],
    sampling: Sampling,
    position: Int[Array, " B"],
) -> Verdict:
    """Judge drafts by rejection sampling; arguments as in `specjax.verify.verify`.

    A greedy row's p is one-hot, whatever its q: a draft is accepted if and only if it is the
    argmax, and the next token is the argmax.
    """
    p = processed_probs(target_logits, sampling)
    q = None if draft_probs is None else draft_probs.astype(jnp.float32)
    slots = position[:, None] + jnp.arange(draft_tokens.shape[1])
    u = uniforms(keys_at(sampling.seed, slots, PURPOSE_ACCEPT))
    accepted = prefix_length(accept_mask(accept_probability(p, q, draft_tokens), u, width))
    law = next_distribution(p, q, draft_tokens, accepted, width)
    next_token = choose(law, keys_at(sampling.seed, position + accepted, PURPOSE_NEXT))
    return verdict(draft_tokens, accepted, next_token, width)


def accept_probability(
    p: Float[Array, "B T V"], q: Float[Array, "B K V"] | None, draft_tokens: Int[Array, "B K"]
) -> Float[Array, "B K"]:
    """Return min(1, p(d) / q(d)) of each draft; q None means q(d) = 1."""
    chosen = draft_tokens[..., None]
    p_draft = jnp.take_along_axis(p[:, :-1], chosen, axis=-1)[..., 0]
    if q is None:
        return p_draft
    q_draft = jnp.take_along_axis(q, chosen, axis=-1)[..., 0]
    return jnp.minimum(1.0, p_draft / jnp.maximum(q_draft, SMALLEST))


def accept_mask(
    probability: Float[Array, "B K"], u: Float[Array, "B K"], width: Int[Array, " B"]
) -> Bool[Array, "B K"]:
    """Accept where u < probability (strictly: zero never, one always) inside the width."""
    slot = jnp.arange(u.shape[1])
    return (u < probability) & (slot < width[:, None])


def next_distribution(
    p: Float[Array, "B T V"],
    q: Float[Array, "B K V"] | None,
    draft_tokens: Int[Array, "B K"],
    accepted: Int[Array, " B"],
    width: Int[Array, " B"],
) -> Float[Array, "B V"]:
    """Return the law of the token behind the accepted drafts.

    The residual max(p - q, 0) / sum at a rejected draft (p itself if rounding left no mass),
    p where all `width` drafts were accepted: a draft that was not judged was not rejected.
    """
    p_here = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
    drafts = draft_tokens.shape[1]
    if drafts == 0:
        return p_here
    rejected = jnp.minimum(accepted, drafts - 1)[:, None]
    if q is None:
        token = jnp.take_along_axis(draft_tokens, rejected, axis=1)
        left = jnp.where(jnp.arange(p.shape[-1]) == token, 0.0, p_here)
    else:
        left = jnp.maximum(p_here - jnp.take_along_axis(q, rejected[..., None], axis=1)[:, 0], 0.0)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    residual = (accepted < jnp.minimum(width, drafts))[:, None] & (mass > SMALLEST)
    return jnp.where(residual, left / jnp.where(residual, mass, 1.0), p_here)
