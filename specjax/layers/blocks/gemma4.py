"""The decoder block of Gemma 4: norms on both sides of attention and MLP, and a learned scale.

    x += norm(attn(norm(x; input)); post_attention)
    x += norm(mlp(norm(x; pre_mlp)); post_mlp)                  experts beside the MLP: gemma4_moe
    x += what the layer's own inputs give                       gemma4_inputs
    x *= scalar

Sliding and full layers differ in window, rope, head size and key-value heads. Scores are not
scaled, since queries and keys are normalised; values are normalised too, without a weight. A layer
without keys of its own only asks: of an earlier layer's keys and values in a target, of the
target's in its assistant (`project_queries`, `mix`, `finish`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float

from specjax.core.params import ParamSpec
from specjax.core.sharding import Layout
from specjax.layers.attention import KeyBlock
from specjax.layers.blocks.dense import MlpWeights, norm_spec
from specjax.layers.blocks.gemma4_inputs import InputWeights, take_in
from specjax.layers.blocks.gemma4_moe import SparseBranch, SparseBranchWeights, join_experts
from specjax.layers.cache.full import FullKind
from specjax.layers.cache.window import WindowKind, window_mask
from specjax.layers.context import Context
from specjax.layers.gelu import gelu_tanh
from specjax.layers.linear import linear
from specjax.layers.norm import rms_norm
from specjax.layers.packing import Packing, pack, spread
from specjax.layers.rope import RopeConfig, apply_rope

Weight = Any
KeysValues = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Gemma4Attention:
    """Sizes and switches of one attention layer.

    Attributes:
        hidden: width H of the residual stream.
        heads: query heads M.
        kv_heads: key-value heads N.
        head_dim: size of a head D.
        eps: of the norms.
        rope: how positions turn queries and keys.
        window: keys that a query sees, its own among them; None in a full layer.
        shared: it has no keys and values of its own.
        value_is_key: values are the raw keys, there is no v_proj.
        bias: biases on q, k, v and o.
        inputs: width of the attention's input, 0 for `hidden`.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    window: int | None = None
    shared: bool = False
    value_is_key: bool = False
    bias: bool = False
    inputs: int = 0

    @property
    def label(self) -> str:
        """Which layers share keys and values with it."""
        return "full" if self.window is None else "sliding"

    @property
    def keys(self) -> FullKind | WindowKind:
        """The cache of the keys and values that it reads, whosever they are."""
        sizes = self.kv_heads, self.head_dim, self.head_dim
        return FullKind(*sizes) if self.window is None else WindowKind(*sizes, self.window)


@struct.dataclass
class Gemma4AttentionWeights:
    """Projections `[out, in]` and norms per head; None where a layer does not have one."""

    q: Weight
    o: Weight
    q_norm: Weight
    k: Weight = None
    v: Weight = None
    k_norm: Weight = None
    q_bias: Weight = None
    k_bias: Weight = None
    v_bias: Weight = None
    o_bias: Weight = None

    @classmethod
    def abstract(cls, config: Gemma4Attention, prefix: str) -> Gemma4AttentionWeights:
        """Return the specs under the published prefix, e.g. `model.layers.0.self_attn.`."""
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        inputs, specs = config.inputs or config.hidden, dict[str, ParamSpec]()

        def matrix(name: str, out: int, into: int, axes: tuple[str, str]) -> None:
            published = f"{prefix}{name}_proj"
            specs[name] = ParamSpec((out, into), axes, f"{published}.weight")
            if config.bias:
                specs[f"{name}_bias"] = ParamSpec(
                    (out,), axes[:1], f"{published}.bias", init="zeros"
                )

        def norm(name: str) -> None:
            specs[name] = ParamSpec((config.head_dim,), (None,), f"{prefix}{name}.weight", "ones")

        matrix("q", wide, inputs, ("heads", "embed"))
        matrix("o", config.hidden, wide, ("embed", "heads"))
        norm("q_norm")
        if not config.shared:
            matrix("k", narrow, inputs, ("kv_heads", "embed"))
            norm("k_norm")
            if not config.value_is_key:
                matrix("v", narrow, inputs, ("kv_heads", "embed"))
        return cls(**specs)


def _heads(
    config: Gemma4Attention, x: jax.Array, w: Weight, bias: Weight, packing: Packing | None
) -> Float[Array, "B N T D"]:
    y = spread(packing, linear(x, w, bias))
    return y.reshape(*y.shape[:-1], -1, config.head_dim).transpose(0, 2, 1, 3)


def project_queries(
    weights: Gemma4AttentionWeights,
    config: Gemma4Attention,
    x: Float[Array, "B T H"],
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    packing: Packing | None = None,
) -> Float[Array, "B M T D"]:
    """Project to queries, norm and rope applied; with a `packing` x is `[1, N, H]`."""
    q = _heads(config, x, weights.q, weights.q_bias, packing)
    return apply_rope(rms_norm(q, weights.q_norm, config.eps), cos, sin)


def project_keys(
    weights: Gemma4AttentionWeights,
    config: Gemma4Attention,
    x: Float[Array, "B T H"],
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    packing: Packing | None = None,
) -> tuple[Float[Array, "B N T D"], Float[Array, "B N T D"]]:
    """Project to (keys, values); values get a norm without weight, and no rope.

    With a `packing` x is `[1, N, H]`.
    """
    k = _heads(config, x, weights.k, weights.k_bias, packing)
    v = k if config.value_is_key else _heads(config, x, weights.v, weights.v_bias, packing)
    k = apply_rope(rms_norm(k, weights.k_norm, config.eps), cos, sin)
    return k, rms_norm(v, None, config.eps)


def visible(config: Gemma4Attention, ctx: Context, entry: Any, new: KeysValues) -> list[KeyBlock]:
    """Return what the new positions see: the cache where there is one, and each other."""
    k, v = new
    mask = ctx.causal
    if config.window is not None:
        mask = window_mask(k.shape[2], config.window)
        if ctx.documents is not None:
            mask = mask & ctx.causal
    if entry is None:
        return [KeyBlock(k, v, mask)]
    kind = entry.k.dtype  # one dtype, as they will be cached
    cached = config.keys.read(entry, ctx.lengths, ctx.positions)
    return [cached, KeyBlock(k.astype(kind), v.astype(kind), mask)]


def mix(
    weights: Gemma4AttentionWeights,
    q: Float[Array, "B M T D"],
    blocks: Sequence[KeyBlock],
    attend: Callable[..., jax.Array],
    packing: Packing | None = None,
) -> Float[Array, "b t H"]:
    """Attend to `blocks`, scores unscaled, and project back; with a `packing` to `[1, N, H]`."""
    return linear(pack(packing, attend(q, blocks, 1.0)), weights.o, weights.o_bias)


def attention(
    weights: Gemma4AttentionWeights,
    config: Gemma4Attention,
    x: Float[Array, "B T H"],
    ctx: Context,
    entry: Any,
) -> tuple[Float[Array, "B T H"], KeysValues | None]:
    """Attend from T new positions to the cache and to each other.

    Returns:
        (`[B, T, H]`, the new keys and values `[B, N, T, D]`, None for a layer without its own).
    """
    tables = ctx.rope(config.rope)
    q = project_queries(weights, config, x, *tables, ctx.packing)
    if config.shared:
        seen, new = visible(config, ctx, *ctx.shared[config.label]), None
    else:
        new = project_keys(weights, config, x, *tables, ctx.packing)
        seen = visible(config, ctx, entry, new)
    return mix(weights, q, seen, ctx.attend, ctx.packing), new


@struct.dataclass
class Gemma4Weights:
    """One decoder layer; `sparse` and `inputs` are None where a layer has none."""

    attention: Gemma4AttentionWeights
    mlp: MlpWeights
    input_norm: Weight
    post_attention_norm: Weight
    pre_mlp_norm: Weight
    post_mlp_norm: Weight
    scalar: Weight
    sparse: SparseBranchWeights | None = None
    inputs: InputWeights | None = None


@dataclasses.dataclass(frozen=True)
class Gemma4Layer:
    """The layer itself, see `layers.layer_kind.LayerKind`.

    Attributes:
        attention: sliding or full, with keys of its own or without.
        mlp: width of the MLP.
        inputs: size of the layer's own inputs, 0 for none.
        sparse: the experts beside the MLP.
    """

    attention: Gemma4Attention
    mlp: int
    inputs: int = 0
    sparse: SparseBranch | None = None

    @property
    def label(self) -> str:
        """Which layers share keys and values with it."""
        return self.attention.label

    @property
    def cache(self) -> FullKind | WindowKind | None:
        """What it keeps of its past: nothing where it reads another layer's."""
        return None if self.attention.shared else self.attention.keys

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope tables it needs."""
        return (self.attention.rope,)

    def abstract(self, prefix: str) -> Gemma4Weights:
        """Return its weight table."""
        hidden = self.attention.hidden

        def norm(name: str) -> ParamSpec:
            return norm_spec(hidden, f"{prefix}{name}_layernorm.weight")

        return Gemma4Weights(
            attention=Gemma4AttentionWeights.abstract(self.attention, f"{prefix}self_attn."),
            mlp=MlpWeights.abstract(hidden, self.mlp, f"{prefix}mlp."),
            input_norm=norm_spec(hidden, f"{prefix}input_layernorm.weight"),
            post_attention_norm=norm("post_attention"),
            pre_mlp_norm=norm("pre_feedforward"),
            post_mlp_norm=norm("post_feedforward"),
            scalar=ParamSpec((1,), (None,), f"{prefix}layer_scalar", init="ones"),
            sparse=SparseBranchWeights.abstract(self.sparse, prefix) if self.sparse else None,
            inputs=InputWeights.abstract(hidden, self.inputs, prefix) if self.inputs else None,
        )

    def run(
        self, weights: Gemma4Weights, x: jax.Array, ctx: Context, entry: Any, index: Any
    ) -> tuple[jax.Array, KeysValues | None]:
        """Run T new positions through the layer; `ctx.extra` holds the inputs `[B, T, L, P]`."""
        normed = rms_norm(x, weights.input_norm, self.attention.eps)
        y, new = attention(weights.attention, self.attention, normed, ctx, entry)
        inputs = None
        if self.inputs:
            inputs = jax.lax.dynamic_index_in_dim(ctx.extra, index, axis=2, keepdims=False)
        return finish(weights, self, x, y, inputs, ctx.layout), new


def finish(
    weights: Gemma4Weights,
    layer: Gemma4Layer,
    x: Float[Array, "B T H"],
    attended: Float[Array, "B T H"],
    inputs: Float[Array, "B T P"] | None = None,
    layout: Layout | None = None,
) -> Float[Array, "B T H"]:
    """Return the residual stream after a layer, given what its attention gave.

    Args:
        weights: of the layer.
        layer: what it is.
        x: the residual stream before it.
        attended: the attention's output.
        inputs: the layer's own inputs, if it has any.
        layout: how weights lie on a mesh; None on one device.
    """
    eps = layer.attention.eps
    x = x + rms_norm(attended, weights.post_attention_norm, eps)
    y = gelu_mlp(weights.mlp, rms_norm(x, weights.pre_mlp_norm, eps))
    if layer.sparse is not None:
        assert weights.sparse is not None
        y = join_experts(weights.sparse, layer.sparse, x, y, layout)
    x = x + rms_norm(y, weights.post_mlp_norm, eps)
    if layer.inputs:
        assert weights.inputs is not None and inputs is not None
        x = x + take_in(weights.inputs, eps, x, inputs)
    return x * weights.scalar.astype(x.dtype)


def gelu_mlp(weights: MlpWeights, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """Apply the gated MLP `down(gelu(gate x) * up x)`, gelu in its tanh form."""
    gate = gelu_tanh(linear(x, weights.gate))
    return linear(gate * linear(x, weights.up), weights.down)
