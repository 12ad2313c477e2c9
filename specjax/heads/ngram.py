"""Prompt lookup: the drafts are what followed the last time the text said the same.

The plainest drafter there is: no weights, no state. The text's last n tokens are looked for in the
text itself, longest n first, and of several places the newest; what stood behind that place is the
draft. It pays where answers repeat their prompt (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal
from specjax.heads.plain_config import NgramConfig

PyTree = Any


@dataclasses.dataclass(frozen=True)
class NgramHead:
    """Looks the last tokens up in the text so far.

    Attributes:
        config: how many tokens must match.
    """

    config: NgramConfig = dataclasses.field(default_factory=NgramConfig)

    name: ClassVar[str] = "ngram"
    taps: ClassVar[tuple[int, ...]] = ()
    reads: ClassVar[tuple[int, ...]] = ()
    max_tokens: ClassVar[int | None] = None

    def specs(self) -> PyTree:
        """It has no weights."""
        return ()

    def init_state(self, batch: int, capacity: int, dtype: str) -> PyTree:
        """It has no state."""
        del batch, capacity, dtype
        return ()

    def observe(
        self, params: PyTree, borrowed: Borrowed, state: PyTree, obs: Observation
    ) -> PyTree:
        """Nothing to take in: the text comes with the context."""
        del params, borrowed, obs
        return state

    def propose(
        self, params: PyTree, borrowed: Borrowed, state: PyTree, context: DraftContext, num: int
    ) -> Proposal:
        """Draft what followed the newest match, as point masses; nothing where nothing matches."""
        del params, borrowed, state
        tokens, lengths = context.tokens, context.lengths
        behind, found = newest_match(tokens, lengths, self.config)
        # A match that reaches into the text's end goes round: the text repeats with that period.
        period = jnp.maximum(lengths - behind, 1)[:, None]
        at = behind[:, None] + jnp.arange(num)[None] % period
        drafts = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), axis=1)
        return Proposal(tokens=drafts, count=jnp.where(found, num, 0))


def newest_match(
    tokens: Int[Array, "B S"], lengths: Int[Array, " B"], config: NgramConfig
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Find the text's last tokens earlier in the text.

    Args:
        tokens: right padded.
        lengths: tokens per row.
        config: how many must match.

    Returns:
        (index behind the newest of the longest matches, whether there is one), `[B]` each.
    """
    size = tokens.shape[1]
    at = jnp.arange(size)[None]
    same = jnp.ones_like(tokens, bool)
    best, found = jnp.zeros_like(lengths), jnp.zeros_like(lengths, bool)
    for n in range(1, config.longest + 1):
        # same[i]: the n tokens that end at i are the text's last n.
        last = jnp.take_along_axis(tokens, jnp.maximum(lengths - n, 0)[:, None], axis=1)
        shifted = jnp.pad(tokens, ((0, 0), (n - 1, 0)), constant_values=-1)[:, :size]
        same &= (shifted == last) & (lengths >= n)[:, None]
        if n < config.shortest:
            continue
        ends = jnp.where(same & (at < lengths[:, None] - 1), at, -1).max(axis=1)
        best = jnp.where(ends >= 0, ends + 1, best)
        found |= ends >= 0
    return best, found
