"""The two layers of Qwen3.5: a gated delta net, or attention whose output is gated per head.

    x += mixer(norm(x; input_norm));  x += ff(norm(x; post_norm))

with a dense or a sparse feed-forward. Norm weights are stored as offsets from 1, but for the one
inside the delta net. The attention layer is also the layer of Qwen3.5's MTP module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.core.params import ParamSpec
from specjax.core.sharding import Layout
from specjax.layers.attention import KeyBlock
from specjax.layers.blocks.dense import AttentionWeights, BlockConfig, MlpWeights, mlp
from specjax.layers.blocks.sparse import SparseConfig, SparseWeights, sparse_mlp
from specjax.layers.cache.full import FullCache, FullKind
from specjax.layers.cache.recurrent import RecurrentCache, RecurrentKind, RecurrentUpdate
from specjax.layers.context import Context
from specjax.layers.deltanet import DeltaNetConfig, DeltaNetWeights, delta_net
from specjax.layers.linear import linear
from specjax.layers.norm import offset_norm
from specjax.layers.rope import RopeConfig, apply_rope

PyTree = Any
Weight = Any
FeedForward = int | SparseConfig  # the width of a dense one, or a sparse one


@struct.dataclass
class Qwen35LayerWeights:
    """One decoder layer.

    Attributes:
        mixer: `DeltaNetWeights`, or `AttentionWeights` of the gated attention.
        feed_forward: `MlpWeights` or `SparseWeights`.
        input_norm: `[H]`, an offset from 1.
        post_norm: `[H]`, an offset from 1.
    """

    mixer: PyTree
    feed_forward: PyTree
    input_norm: Weight
    post_norm: Weight

    @classmethod
    def abstract(
        cls,
        mixer: PyTree,
        feed_forward: FeedForward,
        hidden: int,
        prefix: str,
    ) -> Qwen35LayerWeights:
        """Return the specs under a layer's prefix, e.g. `model.layers.0.`, around its mixer's."""
        return cls(
            mixer=mixer,
            feed_forward=(
                MlpWeights.abstract(hidden, feed_forward, f"{prefix}mlp.")
                if isinstance(feed_forward, int)
                else SparseWeights.abstract(feed_forward, prefix)
            ),
            input_norm=offset_spec(hidden, f"{prefix}input_layernorm.weight"),
            post_norm=offset_spec(hidden, f"{prefix}post_attention_layernorm.weight"),
        )


def offset_spec(size: int, name: str) -> ParamSpec:
    """Return the spec of a norm's weight that is stored as an offset from 1."""
    return ParamSpec((size,), ("embed",), name, init="zeros")


def gated_attention_weights(config: BlockConfig, prefix: str) -> AttentionWeights:
    """Return the specs of gated attention: per head a query and a gate in `q_proj`.

    Args:
        config: sizes of the attention, `qk_norm` on.
        prefix: e.g. `model.layers.3.self_attn.`.
    """
    plain = AttentionWeights.abstract(config, prefix)

    def doubled(spec: ParamSpec | None) -> ParamSpec | None:
        if spec is None:
            return None
        return dataclasses.replace(spec, shape=(2 * spec.shape[0], *spec.shape[1:]))

    def offset(spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(spec, init="zeros")

    return dataclasses.replace(
        plain,
        q=doubled(plain.q),
        q_bias=doubled(plain.q_bias),
        q_norm=offset(plain.q_norm),
        k_norm=offset(plain.k_norm),
    )


def gated_attention(
    weights: AttentionWeights,
    config: BlockConfig,
    x: Float[Array, "B T H"],
    ctx: Context,
    entry: FullCache | None,
) -> tuple[Float[Array, "B T H"], tuple[jax.Array, jax.Array]]:
    """Attend from T new positions to the cache and to each other, and gate what was found.

    The gate, a sigmoid per dim of each head, is made of the same input as the query; neither its
    norm nor its rope touches it.

    Returns:
        (`[B, T, H]`, (keys, values)) with the new keys and values `[B, N, T, D]`.
    """
    dim, (cos, sin) = config.head_dim, ctx.rope(config.rope)

    def heads(w: Weight, bias: Weight, size: int) -> jax.Array:
        y = ctx.spread(linear(x, w, bias))
        return y.reshape(*y.shape[:-1], -1, size).swapaxes(1, 2)

    q, gate = jnp.split(heads(weights.q, weights.q_bias, 2 * dim), 2, axis=-1)
    k, v = heads(weights.k, weights.k_bias, dim), heads(weights.v, weights.v_bias, dim)
    q = apply_rope(offset_norm(q, weights.q_norm, config.eps), cos, sin)
    k = apply_rope(offset_norm(k, weights.k_norm, config.eps), cos, sin)
    cached = [] if entry is None else [config.cache.read(entry, ctx.lengths, ctx.positions)]
    kind = k.dtype if entry is None else entry.k.dtype  # one dtype, as they will be cached
    blocks = [*cached, KeyBlock(k.astype(kind), v.astype(kind), ctx.causal)]
    mixed = ctx.attend(q, blocks, dim**-0.5)
    gate = jax.nn.sigmoid(gate.astype(jnp.float32)).swapaxes(1, 2).reshape(mixed.shape)
    mixed = ctx.pack((mixed * gate).astype(x.dtype))
    return linear(mixed, weights.o, weights.o_bias), (k, v)


def _run(
    weights: Qwen35LayerWeights,
    feed_forward: FeedForward,
    eps: float,
    x: jax.Array,
    mixer: Callable[[jax.Array], tuple[jax.Array, Any]],
    layout: Layout | None,
) -> tuple[jax.Array, Any]:
    """Run a mixer and a feed-forward, each behind a norm and beside the residual stream."""
    y, new = mixer(offset_norm(x, weights.input_norm, eps))
    x = x + y
    normed = offset_norm(x, weights.post_norm, eps)
    if isinstance(feed_forward, int):
        return x + mlp(weights.feed_forward, normed), new
    return x + sparse_mlp(weights.feed_forward, feed_forward, normed, layout), new


@dataclasses.dataclass(frozen=True)
class DeltaNetLayer:
    """A layer with a gated delta net, see `layers.layer_kind.LayerKind`.

    Attributes:
        mixer: the delta net.
        feed_forward: the width of a dense MLP, or a sparse feed-forward.
    """

    mixer: DeltaNetConfig
    feed_forward: FeedForward
    ropes: ClassVar[tuple[RopeConfig, ...]] = ()
    label: ClassVar[str] = "linear"

    @property
    def cache(self) -> RecurrentKind:
        """What it keeps of its past: a state, and the convolution's last inputs."""
        return self.mixer.cache

    def abstract(self, prefix: str) -> Qwen35LayerWeights:
        """Return its weight table."""
        mixer = DeltaNetWeights.abstract(self.mixer, prefix)
        return Qwen35LayerWeights.abstract(mixer, self.feed_forward, self.mixer.hidden, prefix)

    def run(
        self,
        weights: Qwen35LayerWeights,
        x: jax.Array,
        ctx: Context,
        entry: RecurrentCache | None,
        index: Any,
    ) -> tuple[jax.Array, RecurrentUpdate]:
        """Run T new positions through the layer."""
        del index

        def mixer(normed: jax.Array) -> tuple[jax.Array, RecurrentUpdate]:
            return delta_net(
                weights.mixer,
                self.mixer,
                normed,
                ctx.valid,
                entry,
                packing=ctx.packing,
                documents=ctx.documents,
                layout=ctx.layout,
            )

        return _run(weights, self.feed_forward, self.mixer.eps, x, mixer, ctx.layout)


@dataclasses.dataclass(frozen=True)
class GatedAttentionLayer:
    """A layer with gated attention, see `layers.layer_kind.LayerKind`.

    Attributes:
        mixer: sizes of the attention; its `mlp` is not looked at.
        feed_forward: the width of a dense MLP, or a sparse feed-forward.
    """

    mixer: BlockConfig
    feed_forward: FeedForward
    label: ClassVar[str] = "full"

    @property
    def cache(self) -> FullKind:
        """What it keeps of its past."""
        return self.mixer.cache

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope tables it needs."""
        return (self.mixer.rope,)

    def abstract(self, prefix: str) -> Qwen35LayerWeights:
        """Return its weight table."""
        mixer = gated_attention_weights(self.mixer, f"{prefix}self_attn.")
        return Qwen35LayerWeights.abstract(mixer, self.feed_forward, self.mixer.hidden, prefix)

    def run(
        self,
        weights: Qwen35LayerWeights,
        x: jax.Array,
        ctx: Context,
        entry: FullCache | None,
        index: Any,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Run T new positions through the layer."""
        del index

        def mixer(normed: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            return gated_attention(weights.mixer, self.mixer, normed, ctx, entry)

        return _run(weights, self.feed_forward, self.mixer.eps, x, mixer, ctx.layout)
