"""A head whose drafts are mixed: some its own, some true, some wrong, and sure by a hash."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct

from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal
from specjax.layers.sampling import keys_at

_PURPOSE = 77  # none of the engine's


@struct.dataclass
class Script:
    """The weights of a mixed head.

    Attributes:
        inner: the head's own weights.
        texts: `[N, S]` every prompt with its true continuation, told apart by the first token.
    """

    inner: Any
    texts: jax.Array


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A head with part of its drafts replaced.

    Attributes:
        inner: the head.
        how: "greedy" takes own, true and wrong drafts by turns; "true" only true ones; "sampled"
            own ones, and others drawn evenly from the vocabulary.
        vocab: size of the vocabulary.
        confident: give confidences, a hash of place and slot, which know nothing of the drafts.
    """

    inner: Any
    how: Literal["greedy", "true", "sampled"]
    vocab: int
    confident: bool = False

    has_confidence: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    @property
    def reads(self) -> tuple[int, ...]:
        return self.inner.reads

    @property
    def max_tokens(self) -> int | None:
        return self.inner.max_tokens

    def specs(self) -> Any:
        return self.inner.specs()

    def init_state(self, batch: int, capacity: int, dtype: str) -> Any:
        return self.inner.init_state(batch, capacity, dtype)

    def observe(self, params: Script, borrowed: Borrowed, state: Any, obs: Observation) -> Any:
        return self.inner.observe(params.inner, borrowed, state, obs)

    def propose(
        self, params: Script, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        found = self.inner.propose(params.inner, borrowed, state, context, num)
        at = context.lengths[:, None] + jnp.arange(num)
        confidence = 0.4 + 0.6 * ((at * 7919 + 31 * jnp.arange(num)) % 101) / 101
        found = found.replace(confidence=confidence if self.confident else None, count=None)
        return (
            self._sampled(found, context, at)
            if self.how == "sampled"
            else self._greedy(found, params.texts, context, at)
        )

    def _greedy(
        self, found: Proposal, texts: jax.Array, context: DraftContext, at: jax.Array
    ) -> Proposal:
        row = jnp.argmax(texts[None, :, 0] == context.tokens[:, :1], axis=1)[:, None]
        true = texts[row, jnp.minimum(at, texts.shape[1] - 1)]
        if self.how == "true":
            return found.replace(tokens=true, probs=None)
        # 2 own, 8 true, 1 wrong: of seven drafts a fifth are to stand, of one not nearly all.
        turn = (at * 104729 + 7 * row) % 11
        wrong = (true + 1 + turn) % self.vocab
        tokens = jnp.where(turn < 2, found.tokens, jnp.where(turn < 10, true, wrong))
        return found.replace(tokens=tokens, probs=None)

    def _sampled(self, found: Proposal, context: DraftContext, at: jax.Array) -> Proposal:
        keys = keys_at(context.sampling.seed, at, _PURPOSE)
        even = jax.vmap(lambda k: jax.random.randint(k, (), 0, self.vocab))(keys.ravel())
        # Point masses are rarely right where tokens are drawn: fewer of them.
        turn = (at * 104729) % 6
        other = turn < (5 if found.probs is None else 2)
        tokens = jnp.where(other, even.reshape(at.shape), found.tokens)
        law = jax.nn.one_hot(found.tokens, self.vocab) if found.probs is None else found.probs
        law = jnp.where(other[..., None], 1.0 / self.vocab, law)
        return found.replace(tokens=tokens.astype(jnp.int32), probs=law)
