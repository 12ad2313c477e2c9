"""Gemma 4 MTP as a draft head: no cache, no prefill, one remembered state per row.

Its layers ask the keys and values that the target has cached: of the target's last full layer and
its last sliding one, among those that have keys of their own. What the target has cached are the
committed positions, so a rejected draft has nothing it could leave behind. `observe` keeps the
target's last state; `propose` starts from it and carries its own outputs on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from specjax.core.errors import PairingError
from specjax.core.params import init_params, map_specs
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal, TrainBatch
from specjax.heads.chain import draft_chain
from specjax.heads.gemma4_mtp.centroids import CentroidWeights, cluster_tokens
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
from specjax.heads.gemma4_mtp.loss import training_loss
from specjax.heads.gemma4_mtp.network import (
    AssistantWeights,
    Stepped,
    draft_logits,
    query_positions,
    step,
    tables_at,
    visible_keys,
    weight_specs,
)
from specjax.layers.blocks.gemma4 import Gemma4Attention, Gemma4Layer
from specjax.layers.cache.window import WindowKind
from specjax.targets.base import KeyLayer, TargetInfo

PyTree = Any
_MLP = 8  # widths, as all released assistants have it
_NARROWER = 4  # than the target; the released ones are 3.75 to 10 times
_INIT = 0.02


@struct.dataclass
class Gemma4MtpState:
    """What the head remembers of its rows.

    Attributes:
        hidden: `[B, H]` float32 the target's state of the last committed position, after its norm.
    """

    hidden: Float[Array, "B H"]


@dataclasses.dataclass(frozen=True)
class Gemma4MtpHead:
    """A Gemma 4 MTP head without its weights: hashable, equal by value.

    Attributes:
        layers: its layers, none with keys of its own.
        sources: per layer the index in `reads` of the target's layer that it asks.
        reads: layers of the target that are asked.
        keys: what these keep, in the order of `reads`.
        config: conventions, centroids, and how it is trained.
        hidden: its width Ha.
        target_hidden: width H of the target.
        vocab: size of the target's vocabulary.
        eps: of its final norm.
        native: the target's layers are Gemma 4's, whose queries and keys match unscaled.
        model_type: published kind.
        max_context: longest context it is meant for; 0 if unknown.
        embed_scale: factor on the target's embeddings.
        softcap: of the target's logits, for training; the head's own are not capped.
    """

    layers: tuple[Gemma4Layer, ...]
    sources: tuple[int, ...]
    reads: tuple[int, ...]
    keys: tuple[KeyLayer, ...]
    config: Gemma4MtpConfig
    hidden: int
    target_hidden: int
    vocab: int
    eps: float
    native: bool
    model_type: str = "gemma4_assistant"
    max_context: int = 0
    embed_scale: float = 1.0
    softcap: float | None = None

    name: ClassVar[str] = "gemma4_mtp"
    taps: ClassVar[tuple[int, ...]] = ()
    max_tokens: ClassVar[int | None] = None

    @classmethod
    def for_target(cls, info: TargetInfo, config: Gemma4MtpConfig | None = None) -> Gemma4MtpHead:
        """Return a head to be trained for a target.

        Args:
            info: the target's facts.
            config: shape and training.

        Raises:
            PairingError: the target has no full-attention layer with ordinary keys, or sizes do
                not fit.
        """
        config = config or Gemma4MtpConfig()
        last = last_key_layers(info)
        if "full" not in last:
            raise PairingError(
                f"a {info.family} target keeps no ordinary keys of full attention, which the"
                " layers of a Gemma 4 MTP head ask"
            )
        earlier = "sliding" if "sliding" in last else "full"
        labels = [earlier] * (config.layers - 1) + ["full"]
        hidden = config.hidden or max(info.hidden // _NARROWER, 1)
        block = info.draft_block
        most = max(layer.cache.kv_heads for _, layer in last.values())
        heads = config.heads or (block.heads if block is not None else most)
        made = {
            label: _asking(layer, label, hidden, heads, info.eps)
            for label, (_, layer) in last.items()
        }
        mlp = config.mlp or _MLP * hidden
        layers = [Gemma4Layer(made[label], mlp) for label in labels]
        return cls.asking(info, layers, config)

    @classmethod
    def asking(
        cls,
        info: TargetInfo,
        layers: Sequence[Gemma4Layer],
        config: Gemma4MtpConfig,
        model_type: str = "gemma4_assistant",
        max_context: int = 0,
    ) -> Gemma4MtpHead:
        """Return a head of given layers, each asking the target's last layer of its kind.

        Raises:
            PairingError: the target has no such layer, or the clusters do not divide its tokens.
        """
        last = last_key_layers(info)
        wanted = dict.fromkeys(layer.label for layer in layers)
        if missing := [label for label in wanted if label not in last]:
            raise PairingError(
                f"the head's {missing[0]} layers ask keys of a layer of that kind; this"
                f" {info.family} target has none with ordinary keys of its own"
            )
        if config.centroids and info.vocab % config.centroids:
            raise PairingError(
                f"{config.centroids} centroids do not divide a vocabulary of {info.vocab} tokens"
            )
        asked = sorted(last[label][0] for label in wanted)
        attention = layers[0].attention
        return cls(
            layers=tuple(layers),
            sources=tuple(asked.index(last[layer.label][0]) for layer in layers),
            reads=tuple(asked),
            keys=tuple(key for i in asked if (key := info.key_layers[i]) is not None),
            config=config,
            hidden=attention.hidden,
            target_hidden=info.hidden,
            vocab=info.vocab,
            eps=attention.eps,
            native=info.family.startswith("gemma4"),
            model_type=model_type,
            max_context=max_context or info.max_context,
            embed_scale=info.embed_scale,
            softcap=info.softcap,
        )

    def window(self, index: int) -> int | None:
        """Return how many keys layer `index` sees, None where it sees all."""
        return self.layers[index].attention.window

    def specs(self) -> AssistantWeights:
        """Return the weight table."""
        return weight_specs(self)

    def trainable(self) -> AssistantWeights:
        """Return which weights training changes: a tree of bools like the weights."""
        # Gemma's layer_scalar is stored, not trained; the clusters' order is a table of ids.
        return map_specs(
            lambda spec: not spec.dtype and not spec.hf.endswith("layer_scalar"), self.specs()
        )

    def init(self, key: jax.Array, borrowed: Borrowed, dtype: str = "float32") -> AssistantWeights:
        """Draw fresh weights.

        The output layer starts as a random projection of the target's, so that tokens which are
        alike to the target are alike to the head; tokens are clustered by it. Keys of other
        targets than Gemma 4 expect scores divided by the root of their size: there the queries'
        norms start with that factor.

        Args:
            key: PRNG key.
            borrowed: the target's embedding and output layer.
            dtype: of the weights.
        """
        drawn, projected = jax.random.split(key)
        params = init_params(self.specs(), drawn, dtype)
        mixing = jax.random.normal(projected, (self.target_hidden, self.hidden), jnp.float32)
        table = borrowed.output.astype(jnp.float32) @ mixing
        table = table * (_INIT / jnp.maximum(jnp.std(table), 1e-9))
        clusters = None
        if params.clusters is not None:
            centroids, order = cluster_tokens(np.asarray(table), self.config.centroids)
            clusters = CentroidWeights(jnp.asarray(centroids, dtype), jnp.asarray(order))
        layers = params.layers if self.native else tuple(map(_softened, params.layers))
        return dataclasses.replace(
            params, embedding=table.astype(dtype), clusters=clusters, layers=layers
        )

    def init_state(self, batch: int, capacity: int, dtype: str = "float32") -> Gemma4MtpState:
        """Return the state before any token."""
        del capacity, dtype  # nothing grows, and one state is too small to be rounded
        return Gemma4MtpState(hidden=jnp.zeros((batch, self.target_hidden), jnp.float32))

    def observe(
        self,
        params: AssistantWeights,
        borrowed: Borrowed,
        state: Gemma4MtpState,
        obs: Observation,
    ) -> Gemma4MtpState:
        """Keep the target's state of the last committed position."""
        del params, borrowed
        last = jnp.maximum(obs.count - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(obs.hidden, last, axis=1)[:, 0].astype(jnp.float32)
        return Gemma4MtpState(hidden=jnp.where((obs.count > 0)[:, None], newest, state.hidden))

    def propose(
        self,
        params: AssistantWeights,
        borrowed: Borrowed,
        state: Gemma4MtpState,
        context: DraftContext,
        num: int,
    ) -> Proposal:
        """Draft `num` tokens per row, each step fed the token and the state of the one before."""
        return self.draft(params, borrowed, state, context, num)[0]

    def draft(
        self,
        params: AssistantWeights,
        borrowed: Borrowed,
        state: Gemma4MtpState,
        context: DraftContext,
        num: int,
        extra_keys: int = 0,
    ) -> tuple[Proposal, list[Stepped], list[jax.Array]]:
        """Do what `propose` does, and return each step and its logits too.

        Args:
            params: weights.
            borrowed: the target's embedding.
            state: of the rows.
            context: of the round.
            num: drafts per row.
            extra_keys: see `network.visible_keys`; for comparison with a reference.

        Returns:
            (proposal, the steps, logits `[B, V]` of each).
        """
        steps: list[Stepped] = []
        seen: list[jax.Array] = []
        keys = visible_keys(self, context.keys, context.position, extra_keys)
        tables = tables_at(self, query_positions(self, context.position)[:, None])

        def run(token: jax.Array, carried: jax.Array) -> jax.Array:
            steps.append(step(self, params, borrowed, token[:, None], carried, tables, keys))
            seen.append(draft_logits(self, params, steps[-1].hidden[:, 0]))
            return seen[-1]

        proposal = draft_chain(
            lambda: run(context.anchor, state.hidden[:, None]),
            lambda k, token: run(token, steps[-1].state),
            num,
            context,
            vocab=self.vocab,
            point_mass=self.config.greedy_drafts,
        )
        return proposal, steps, seen

    def loss(
        self, params: AssistantWeights, borrowed: Borrowed, batch: TrainBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the training loss and its metrics; see `heads.gemma4_mtp.loss`."""
        return training_loss(self, params, borrowed, batch)


def last_key_layers(info: TargetInfo) -> dict[str, tuple[int, KeyLayer]]:
    """Return, per kind "full" and "sliding", the target's last layer with keys of its own."""
    found: dict[str, tuple[int, KeyLayer]] = {}
    for i, layer in enumerate(info.key_layers):
        if layer is not None:
            found["sliding" if isinstance(layer.cache, WindowKind) else "full"] = i, layer
    return found


def _asking(layer: KeyLayer, label: str, hidden: int, heads: int, eps: float) -> Gemma4Attention:
    """Return attention that asks the keys of a target's layer."""
    cache = layer.cache
    if heads % cache.kv_heads:
        raise PairingError(
            f"Gemma4Mtp.heads {heads} do not divide over the {cache.kv_heads} key-value heads of"
            f" the target's {label} layers"
        )
    if cache.k_dim != cache.v_dim:
        raise PairingError(
            f"the target's {label} layers have keys of {cache.k_dim} and values of"
            f" {cache.v_dim} dims; a Gemma 4 layer has one size for both"
        )
    return Gemma4Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=cache.kv_heads,
        head_dim=cache.k_dim,
        eps=eps,
        rope=layer.rope,
        window=cache.window if isinstance(cache, WindowKind) else None,
        shared=True,
    )


def _softened(weights: Any) -> Any:
    """Return a fresh layer whose queries are divided by the root of their size."""
    attention = weights.attention
    norm = attention.q_norm * attention.q_norm.shape[0] ** -0.5
    return dataclasses.replace(
        weights,
        attention=dataclasses.replace(attention, q_norm=norm.astype(attention.q_norm.dtype)),
    )
