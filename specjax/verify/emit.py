"""What a verdict is, and what of it a row may emit."""

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@flax.struct.dataclass
class Verdict:
    """The outcome of one verification, before stop tokens and budgets cut it."""

    accepted: Int[Array, " B"]
    """Length of the accepted prefix of the drafts."""
    tokens: Int[Array, "B T"]
    """T = K + 1: the accepted drafts, the target's own token at index `accepted`, zeros."""
    admitted: Int[Array, " B"]
    """How many drafts were judged: min(width, K)."""


def verdict(
    draft_tokens: Int[Array, "B K"],
    accepted: Int[Array, " B"],
    next_token: Int[Array, " B"],
    width: Int[Array, " B"],
) -> Verdict:
    """Lay out a verdict: accepted drafts, then the next token."""
    slot = jnp.arange(draft_tokens.shape[1] + 1)
    padded = jnp.pad(draft_tokens.astype(jnp.int32), ((0, 0), (0, 1)))
    here = accepted[:, None]
    tokens = jnp.where(slot == here, next_token[:, None], jnp.where(slot < here, padded, 0))
    return Verdict(
        accepted=accepted.astype(jnp.int32),
        tokens=tokens.astype(jnp.int32),
        admitted=jnp.clip(width, 0, draft_tokens.shape[1]).astype(jnp.int32),
    )


def prefix_length(holds: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Return how many entries of each row are true before the first false one."""
    return jnp.sum(jnp.cumprod(holds.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def cut_at_stop(
    tokens: Int[Array, "B T"],
    accepted: Int[Array, " B"],
    stop_ids: Sequence[int] | Int[Array, " n"],
    budget: Int[Array, " B"],
    done: Bool[Array, " B"],
) -> Int[Array, " B"]:
    """Return how many of `tokens` each row emits.

    The smallest of: accepted + 1, the budget left, the first stop token and all before it;
    0 for rows that are done. Entries of `tokens` behind `accepted` do not matter.
    """
    before_stop = prefix_length(~_is_stop(tokens, stop_ids))
    emitted = jnp.minimum(jnp.minimum(accepted + 1, before_stop + 1), budget)
    # Never true, but it ties the count to this round's logits even without drafts and stop
    # tokens; XLA writes the cache in place only behind the last read of it.
    nothing = done | (tokens[:, 0] < 0)
    return jnp.where(nothing, 0, jnp.maximum(emitted, 0)).astype(jnp.int32)


def contains_stop(
    tokens: Int[Array, "B T"], count: Int[Array, " B"], stop_ids: Sequence[int] | Int[Array, " n"]
) -> Bool[Array, " B"]:
    """Tell whether a stop token is among the first `count` tokens of each row."""
    return prefix_length(~_is_stop(tokens, stop_ids)) < jnp.minimum(count, tokens.shape[1])


def tally(
    accepted: Int[Array, " B"], admitted: Int[Array, " B"], emitted: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return (drafts kept, drafts counted as proposed) after the cut, for the statistics.

    A cut inside the accepted drafts ends the proposal there: what lay behind had no chance.
    """
    kept = jnp.minimum(accepted, emitted)
    return kept, jnp.where(emitted <= accepted, kept, admitted)


def _is_stop(
    tokens: Int[Array, "B T"], stop_ids: Sequence[int] | Int[Array, " n"]
) -> Bool[Array, "B T"]:
    stops = jnp.asarray(stop_ids, jnp.int32)
    return jnp.any(tokens[..., None] == stops, axis=-1)
