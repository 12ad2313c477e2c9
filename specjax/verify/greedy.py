"""Greedy verification: a draft stands while it is the target's argmax."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.layers.sampling import first_argmax
from specjax.verify.emit import Verdict, prefix_length, verdict


def greedy(
    target_logits: Float[Array, "B T V"],
    draft_tokens: Int[Array, "B K"],
    width: Int[Array, " B"],
) -> Verdict:
    """Accept the drafts that match; the next token is the argmax behind them (T = K + 1).

    Of tied logits the lowest id wins, in every dtype the same way.
    """
    choice = first_argmax(target_logits)
    slot = jnp.arange(draft_tokens.shape[1])
    accepted = prefix_length((choice[:, :-1] == draft_tokens) & (slot < width[:, None]))
    next_token = jnp.take_along_axis(choice, accepted[:, None], axis=1)[:, 0]
    return verdict(draft_tokens, accepted, next_token, width)
