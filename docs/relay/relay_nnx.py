"""Relay written as a `flax.nnx` module: the weights inside, everything else as in relay.py.

`specjax.interop.nnx.from_module` makes it a head that trainer and engine take like any other.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from specjax.heads import reach
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal, TrainBatch
from specjax.heads.chain import draft_chain
from specjax.targets.base import TargetInfo


class RelayModule(nnx.Module):
    """See relay.py."""

    name = "relay"
    taps = ()

    def __init__(self, info: TargetInfo, config: Any, *, rngs: nnx.Rngs) -> None:
        """Draw fresh weights for a target."""
        hidden, width = info.hidden, config.width
        draw = nnx.initializers.normal(0.02)
        self.state_norm = nnx.RMSNorm(hidden, epsilon=info.eps, rngs=rngs)
        self.token_norm = nnx.RMSNorm(hidden, epsilon=info.eps, rngs=rngs)
        self.up = nnx.Linear(2 * hidden, width, use_bias=False, kernel_init=draw, rngs=rngs)
        self.down = nnx.Linear(width, hidden, use_bias=False, kernel_init=draw, rngs=rngs)
        self.info, self.config = info, config

    def __call__(self, borrowed: Borrowed, state: jax.Array, token: jax.Array) -> jax.Array:
        """Return f(state, token)."""
        rows = borrowed.embedding[token].astype(state.dtype) * self.info.embed_scale
        joined = jnp.concatenate([self.state_norm(state), self.token_norm(rows)], axis=-1)
        return state + self.down(nnx.silu(self.up(joined)))

    def logits(self, borrowed: Borrowed, state: jax.Array) -> jax.Array:
        """Return float32 logits, capped as the target's are."""
        raw = state.astype(jnp.float32) @ borrowed.output.astype(jnp.float32).T
        cap = self.info.softcap
        return raw if cap is None else cap * jnp.tanh(raw / cap)

    def init_state(self, batch: int, capacity: int, dtype: str = "float32") -> jax.Array:
        """Return the state before any token."""
        del capacity
        return jnp.zeros((batch, self.info.hidden), dtype)

    def observe(self, borrowed: Borrowed, state: jax.Array, obs: Observation) -> jax.Array:
        """Start anew from the last committed position."""
        last = jnp.maximum(obs.count - 1, 0)
        rows = jnp.arange(last.shape[0])
        newest = obs.hidden[rows, last].astype(self.up.kernel.dtype)
        made = self(borrowed, newest, obs.next_tokens[rows, last])
        return jnp.where((obs.count > 0)[:, None], made.astype(state.dtype), state)

    def propose(
        self, borrowed: Borrowed, state: jax.Array, context: DraftContext, num: int
    ) -> Proposal:
        """Draft one token after another."""
        states = [state.astype(self.up.kernel.dtype)]

        def advance(k: int, token: jax.Array) -> jax.Array:
            states.append(self(borrowed, states[k], token))
            return self.logits(borrowed, states[-1])

        first = self.logits(borrowed, states[0])
        return draft_chain(lambda: first, advance, num, context, vocab=self.info.vocab)

    def loss(self, borrowed: Borrowed, batch: TrainBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the weighted cross entropy of all steps; rows are single texts."""
        steps, length = self.config.steps, batch.tokens.shape[1]
        window = length - steps - 1
        states = batch.hidden[:, :window].astype(self.up.kernel.dtype)
        valid = batch.loss_mask & (jnp.arange(length) < batch.lengths[:, None])
        total, right, counted = jnp.float32(0), [], []
        for k in range(steps):
            label = slice(k + 2, k + 2 + window)
            states = self(borrowed, states, batch.tokens[:, k + 1 : k + 1 + window])
            logits, labels, mask = (
                self.logits(borrowed, states),
                batch.tokens[:, label],
                valid[:, label],
            )
            terms = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            mean = jnp.sum(terms, where=mask) / jnp.maximum(jnp.sum(mask), 1)
            total = total + self.config.decay**k * mean
            right.append(jnp.argmax(logits, -1) == labels)
            counted.append(mask)
        return total, reach.metrics(jnp.stack(right, -1), None, jnp.stack(counted, -1))
