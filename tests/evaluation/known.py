"""A head whose acceptance is known: its first drafts are right, the others wrong."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal

VOCAB = 61
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class KnownHead:
    """Its weights are the true texts `[N, S]`, a row per prompt, told apart by first tokens."""

    good: int = 2
    max_tokens: int | None = 7
    reads: ClassVar[tuple[int, ...]] = ()

    name: ClassVar[str] = "eagle3"
    taps: ClassVar[tuple[int, ...]] = ()

    def specs(self) -> Any:
        return ()

    def init_state(self, batch: int, capacity: int, dtype: str) -> Any:
        return jnp.zeros((batch,), jnp.int32)

    def observe(self, params: Any, borrowed: Borrowed, state: Any, obs: Observation) -> Any:
        return state + obs.count

    def propose(
        self, params: Any, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        which = jnp.argmax(params[None, :, 0] == context.tokens[:, :1], axis=1)
        slot = jnp.arange(num)[None]
        at = jnp.minimum(context.lengths[:, None] + slot, params.shape[1] - 1)
        true = params[which[:, None], at]
        return Proposal(tokens=jnp.where(slot < self.good, true, (true + 1) % VOCAB))
