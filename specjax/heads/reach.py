"""How far rounds would get, told from a head's teacher-forced outputs without decoding.

A chain is what a round would draft from one place of a text. Each of its slots has a share: 1 or 0
where drafts are compared with a token, or the overlap of both distributions, which is the
probability that a sampled draft is accepted. Averaged over the places of a text, not over those
where real rounds start: these follow a rejection, and are harder than the average.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def reach(
    share: Float[Array, "*B K"],
    counted: Bool[Array, "*B K"],
    alive: Bool[Array, "*B"] | None = None,
) -> Float[Array, " K"]:
    """Return per slot how often a chain gets that far, its own slot accepted.

    Args:
        share: of each slot.
        counted: slots that have something to be compared with; another ends the chain.
        alive: chains to average over; None: those whose first slot counts.

    Returns:
        Means of the running products; 0 without any chain.
    """
    alive = counted[..., 0] if alive is None else alive
    products = jnp.cumprod(jnp.where(counted, share.astype(jnp.float32), 0.0), axis=-1)
    over = tuple(range(alive.ndim))
    total = jnp.sum(jnp.where(alive[..., None], products, 0.0), axis=over)
    return total / jnp.maximum(jnp.sum(alive), 1)


def metrics(
    right: Bool[Array, "*B K"],
    accept: Float[Array, "*B K"] | None,
    counted: Bool[Array, "*B K"],
    alive: Bool[Array, "*B"] | None = None,
) -> dict[str, jax.Array]:
    """Return what losses report of their chains.

    `reach_greedy` and `reach_probabilistic` `[K]` (`reach`), and `tau_greedy` and
    `tau_probabilistic`: expected tokens of a round of K drafts, the bonus included. Of fewer
    drafts it is 1 + the sum of as many of the reaches.

    Args:
        right: the head's best token is the one it is compared with.
        accept: overlap of both distributions; None where the target's is not known.
        counted: as in `reach`.
        alive: as in `reach`.
    """
    found = {"greedy": right} if accept is None else {"greedy": right, "probabilistic": accept}
    out: dict[str, jax.Array] = {}
    for name, share in found.items():
        reached = reach(share, counted, alive)
        out |= {f"reach_{name}": reached, f"tau_{name}": 1.0 + jnp.sum(reached)}
    return out
