"""A tiny configuration, and a head that drafts from a script."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal

VOCAB = 97
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class ScriptedHead:
    """Drafts the true continuation, spoilt at positions that a hash picks.

    Its weights are the script `[N, S]`: one row per prompt, found by the prompt's first token.
    Its state counts what it observed, so that tests can hold it against what was committed.
    """

    spoil: int = 3  # one draft in `spoil` is wrong; 0 spoils none, 1 all
    vocab: int = VOCAB
    sampled: bool = False

    name: ClassVar[str] = "ngram"
    taps: tuple[int, ...] = (0, 1)
    max_tokens: int | None = None
    reads: ClassVar[tuple[int, ...]] = ()

    def specs(self) -> Any:
        return ()

    def init_state(self, batch: int, capacity: int, dtype: str) -> Any:
        return jnp.zeros((batch, capacity), jnp.int32)

    def observe(self, params: Any, borrowed: Borrowed, state: Any, obs: Observation) -> Any:
        step = jnp.arange(obs.tokens.shape[1])[None]
        at = jnp.where(step < obs.count[:, None], obs.start[:, None] + step, state.shape[1] + step)
        # Remember 1 + (token, next token) of every committed position.
        pair = 1 + obs.tokens * self.vocab + obs.next_tokens
        return jax.vmap(lambda row, i, p: row.at[i].set(p, mode="drop"))(state, at, pair)

    def propose(
        self, params: Any, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        script = params
        which = jnp.argmax(script[None, :, 0] == context.tokens[:, :1], axis=1)
        at = context.lengths[:, None] + jnp.arange(num)[None]
        true = script[which[:, None], jnp.minimum(at, script.shape[1] - 1)]
        if not self.spoil:
            return Proposal(tokens=true)
        noise = (at * 7919 + which[:, None] * 104729) % 1009
        wrong = (true + 1 + noise % (self.vocab - 1)) % self.vocab
        tokens = jnp.where(noise % self.spoil == 0, wrong, true)
        if not self.sampled:
            return Proposal(tokens=tokens)
        uniform = jnp.full((*tokens.shape, self.vocab), 1.0 / self.vocab)
        return Proposal(tokens=tokens, probs=uniform)
