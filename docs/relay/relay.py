"""Relay: a whole draft head in one file, the example of docs/add_a_head.md.

    python docs/relay/relay.py --target TARGET_DIR --data answers.jsonl --out runs/relay

One layer turns a state and the token behind it into the next state:

    f(z, x) = z + W2 silu(W1 [norm(z) ; norm(E x)])

A round starts at the newest true state h and the anchor, z_0 = f(h, anchor), and goes on with its
own drafts: d_k from the logits (output z_k), z_{k+1} = f(z_k, d_k). E and output are the target's.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from specjax import configurables
from specjax.core.errors import ConfigError
from specjax.core.params import ParamSpec, init_params
from specjax.heads import reach
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal, TrainBatch
from specjax.heads.chain import draft_chain
from specjax.io.hf import load_params, read_config, save_checkpoint
from specjax.layers.embedding import lookup
from specjax.layers.linear import capped, linear, linear_f32
from specjax.layers.norm import rms_norm
from specjax.targets.base import TargetInfo
from specjax.train_door import train_door


@dataclasses.dataclass(frozen=True)
class RelayConfig:
    """Relay's shape, and how it is trained.

    Attributes:
        width: of the layer's middle.
        steps: drafts that training unrolls.
        decay: step k weighs this to the power of k.
    """

    width: int = 256
    steps: int = 3
    decay: float = 0.7

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if min(self.width, self.steps) < 1 or self.decay <= 0:
            raise ConfigError("Relay.width and steps must be at least 1, decay positive")


@struct.dataclass
class RelayWeights:
    """Its weights.

    Attributes:
        state_norm: `[H]` for states.
        token_norm: `[H]` for embeddings.
        up: `[M, 2H]`.
        down: `[H, M]`.
    """

    state_norm: Any
    token_norm: Any
    up: Any
    down: Any


@dataclasses.dataclass(frozen=True)
class RelayHead:
    """Relay without its weights: hashable, equal by value.

    Attributes:
        config: shape and training.
        hidden: width H of the target.
        vocab: its vocabulary.
        eps: of its norms.
        embed_scale: factor on its embeddings.
        softcap: of its logits, None for none.
    """

    config: RelayConfig
    hidden: int
    vocab: int
    eps: float
    embed_scale: float = 1.0
    softcap: float | None = None

    name: ClassVar[str] = "relay"
    taps: ClassVar[tuple[int, ...]] = ()  # it asks for no residual streams,
    reads: ClassVar[tuple[int, ...]] = ()  # and for no keys
    max_tokens: ClassVar[int | None] = None

    @classmethod
    def for_target(cls, info: TargetInfo, config: RelayConfig) -> RelayHead:
        """Return a head to be trained for a target."""
        return cls(config, info.hidden, info.vocab, info.eps, info.embed_scale, info.softcap)

    def specs(self) -> RelayWeights:
        """Return the weight table: shapes, and the names of a file."""
        hidden, width = self.hidden, self.config.width
        return RelayWeights(
            state_norm=ParamSpec((hidden,), (None,), "state_norm.weight", init="ones"),
            token_norm=ParamSpec((hidden,), (None,), "token_norm.weight", init="ones"),
            up=ParamSpec((width, 2 * hidden), ("mlp", "embed"), "up.weight"),
            down=ParamSpec((hidden, width), ("embed", "mlp"), "down.weight"),
        )

    def init(self, key: jax.Array) -> RelayWeights:
        """Draw fresh weights."""
        return init_params(self.specs(), key)

    def step(
        self,
        params: RelayWeights,
        borrowed: Borrowed,
        state: Float[Array, "*B H"],
        token: Int[Array, "*B"],
    ) -> Float[Array, "*B H"]:
        """Return f(state, token)."""
        rows = lookup(borrowed.embedding, token).astype(state.dtype) * self.embed_scale
        joined = jnp.concatenate(
            [
                rms_norm(state, params.state_norm, self.eps),
                rms_norm(rows, params.token_norm, self.eps),
            ],
            axis=-1,
        )
        return state + linear(jax.nn.silu(linear(joined, params.up)), params.down)

    def logits(self, borrowed: Borrowed, state: Float[Array, "*B H"]) -> Float[Array, "*B V"]:
        """Return float32 logits, capped as the target's are."""
        return capped(linear_f32(state, borrowed.output), self.softcap)

    # In a round: one state per row is all that it remembers.

    def init_state(self, batch: int, capacity: int, dtype: str = "float32") -> jax.Array:
        """Return the state before any token; rows on axis 0."""
        del capacity
        return jnp.zeros((batch, self.hidden), dtype)

    def observe(
        self, params: RelayWeights, borrowed: Borrowed, state: jax.Array, obs: Observation
    ) -> jax.Array:
        """Start anew from the last committed position; rows with none keep their state."""
        last = jnp.maximum(obs.count - 1, 0)[:, None]
        newest = jnp.take_along_axis(obs.hidden, last[..., None], axis=1)[:, 0]
        anchor = jnp.take_along_axis(obs.next_tokens, last, axis=1)[:, 0]
        made = self.step(params, borrowed, newest.astype(params.up.dtype), anchor)
        return jnp.where((obs.count > 0)[:, None], made.astype(state.dtype), state)

    def propose(
        self,
        params: RelayWeights,
        borrowed: Borrowed,
        state: jax.Array,
        context: DraftContext,
        num: int,
    ) -> Proposal:
        """Draft one token after another; the state is only read."""
        states = [state.astype(params.up.dtype)]

        def advance(k: int, token: jax.Array) -> jax.Array:
            states.append(self.step(params, borrowed, states[k], token))
            return self.logits(borrowed, states[-1])

        return draft_chain(
            lambda: self.logits(borrowed, states[0]), advance, num, context, vocab=self.vocab
        )

    # In training: the same steps, fed the text's tokens.

    def loss(
        self, params: RelayWeights, borrowed: Borrowed, batch: TrainBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the weighted cross entropy of all steps, and what the log shows.

        Step k starts at index t, has seen x_{t+1} .. x_{t+1+k} and predicts x_{t+2+k}.
        """
        steps, length = self.config.steps, batch.tokens.shape[1]
        window = length - steps - 1
        if window < 1:
            raise ConfigError(f"Relay.steps {steps} needs texts longer than {length} tokens")
        states = batch.hidden[:, :window].astype(params.up.dtype)
        valid = batch.loss_mask & (jnp.arange(length) < batch.lengths[:, None])
        total, right, counted = jnp.float32(0), [], []
        for k in range(steps):
            label = slice(k + 2, k + 2 + window)
            states = self.step(params, borrowed, states, batch.tokens[:, k + 1 : k + 1 + window])
            logits, labels = self.logits(borrowed, states), batch.tokens[:, label]
            mask = valid[:, label]
            if batch.documents is not None:  # rows that pack several texts
                mask = mask & (batch.documents[:, label] == batch.documents[:, :window])
            terms = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            mean = jnp.sum(jnp.where(mask, terms, 0)) / jnp.maximum(jnp.sum(mask), 1)
            total = total + self.config.decay**k * mean
            right.append(jnp.argmax(logits, -1) == labels)
            counted.append(mask)
        return total, reach.metrics(jnp.stack(right, -1), None, jnp.stack(counted, -1))

    # On disk.

    def save(self, params: RelayWeights, path: str | Path, dtype: str | None = None) -> None:
        """Write weights and configuration, whole or not at all."""
        said = {"architectures": ["RelayHead"], **dataclasses.asdict(self.config)}
        save_checkpoint(self.specs(), params, said, path, dtype)


def load(path: str | Path, info: TargetInfo) -> tuple[RelayHead, RelayWeights]:
    """Read what `save` wrote."""
    said = read_config(path)
    config = RelayConfig(**{f.name: said[f.name] for f in dataclasses.fields(RelayConfig)})
    head = RelayHead.for_target(info, config)
    return head, load_params(head.specs(), path)


def make(target: Any, settings: Any, borrowed: Any, key: Any, kept: Any) -> tuple[Any, Any]:
    """Return (head, fresh weights), as `train_door` asks for them."""
    del borrowed, kept
    head = RelayHead.for_target(target.info, settings)
    return head, head.init(key)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    configurables.register("Relay", RelayConfig)
    recipe = str(Path(__file__).with_suffix(".gin"))
    return train_door(argv, usage=__doc__, head="Relay", make=make, recipe=recipe)


if __name__ == "__main__":
    sys.exit(main())
