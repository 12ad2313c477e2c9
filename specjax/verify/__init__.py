"""Verification: how many drafts stand, and which token the target adds. Arrays in, arrays out."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.layers.sampling import Sampling
from specjax.verify.emit import Verdict, contains_stop, cut_at_stop, tally
from specjax.verify.greedy import greedy
from specjax.verify.rejection import rejection

__all__ = ["Verdict", "contains_stop", "cut_at_stop", "greedy", "rejection", "tally", "verify"]


def verify(
    target_logits: Float[Array, "B T V"],
    draft_tokens: Int[Array, "B K"],
    draft_probs: Float[Array, "B K V"] | None,
    width: Int[Array, " B"],
    sampling: Sampling,
    position: Int[Array, " B"],
) -> Verdict:
    """Judge a batch that may mix greedy and sampled rows, with one program.

    A batch of greedy rows takes `greedy`; any sampled row takes the whole batch through
    `rejection`, which gives its greedy rows the same verdict as `greedy` would.

    Args:
        target_logits: row k is the target's prediction of draft k; row T - 1 = K of what follows.
        draft_tokens: the drafts; K may be 0, which is plain decoding.
        draft_probs: what they were drawn from, or None if they are certain (a point mass).
        width: how many drafts of the row to judge; later ones count as not drafted.
        sampling: the rows' options, those the drafts were drawn with.
        position: index in its sequence of the row's first draft.
    """
    return lax.cond(
        jnp.any(sampling.sampled),
        lambda: rejection(target_logits, draft_tokens, draft_probs, width, sampling, position),
        lambda: greedy(target_logits, draft_tokens, width),
    )
