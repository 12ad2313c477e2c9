"""A small model as the drafter: any target family, with a cache of its own.

The classic form of speculative decoding (Leviathan et al. 2023, arXiv 2211.17192). It sees tokens
alone, nothing of the target's insides, so the two must share their vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.core.errors import PairingError
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal
from specjax.heads.chain import draft_chain
from specjax.targets.base import Cache, Target, TargetInfo

PyTree = Any


@dataclasses.dataclass(frozen=True)
class SmallModelHead:
    """A target that drafts for a larger one; its weights are that target's.

    Attributes:
        model: the small model.
    """

    model: Target

    name: ClassVar[str] = "small_model"
    taps: ClassVar[tuple[int, ...]] = ()
    reads: ClassVar[tuple[int, ...]] = ()
    max_tokens: ClassVar[int | None] = None

    @classmethod
    def for_target(cls, info: TargetInfo, model: Target) -> SmallModelHead:
        """Return the head that drafts for a target with `model`.

        Raises:
            PairingError: their vocabularies differ in size.
        """
        if model.info.vocab != info.vocab:
            raise PairingError(
                f"the small model has {model.info.vocab} tokens, the target {info.vocab}: they"
                " must share a vocabulary"
            )
        return cls(model)

    @property
    def max_context(self) -> int:
        """Longest text it drafts for."""
        return self.model.info.max_context

    def specs(self) -> PyTree:
        """Return the small model's weight table."""
        return self.model.specs()

    def init_state(self, batch: int, capacity: int, dtype: str) -> Cache:
        """Return the small model's empty cache."""
        return self.model.init_cache(batch, capacity, dtype)

    def _on(self, borrowed: Borrowed) -> Target:
        """Return the model, its weights lying as the target's do."""
        return dataclasses.replace(self.model, layout=borrowed.layout)

    def observe(self, params: PyTree, borrowed: Borrowed, state: Cache, obs: Observation) -> Cache:
        """Read the committed tokens."""
        out = self._on(borrowed).forward(params, obs.tokens, obs.count, state)
        # Tied to what attention read, so that XLA writes the cache behind its last read of it.
        count = jnp.where(out.hidden[:, 0, 0] > jnp.inf, 0, obs.count)
        return self.model.commit(state, out.update, count)

    def propose(
        self, params: PyTree, borrowed: Borrowed, state: Cache, context: DraftContext, num: int
    ) -> Proposal:
        """Draft `num` tokens, each from all before it.

        The drafts in flight are run anew with each further one instead of being written anywhere:
        a cache that is written inside a round is copied, and a handful of tokens costs a pass
        little more than one.
        """
        model = self._on(borrowed)
        inputs = [context.anchor]

        def logits() -> jax.Array:
            tokens = jnp.stack(inputs, axis=1)
            hidden = model.forward(params, tokens, None, state).hidden[:, -1]
            return model.logits(params, hidden)

        def advance(k: int, token: jax.Array) -> jax.Array:
            del k
            inputs.append(token)
            return logits()

        return draft_chain(logits, advance, num, context, vocab=self.model.info.vocab)
