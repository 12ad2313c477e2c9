"""The pre-norm decoder block of Llama and Qwen3: grouped-query attention and a SwiGLU MLP.

    x += o(attn(norm(x; input_norm)));  x += down(silu(gate y) * up y), y = norm(x; post_norm)

Qwen3 adds a norm per head on queries and keys. EAGLE-3's layer is the same attention and MLP on a
wider input (`AttentionConfig.inputs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import struct
from jaxtyping import Array, Float

from specjax.core.errors import CheckpointError
from specjax.core.params import ParamSpec
from specjax.core.published import required
from specjax.layers.attention import KeyBlock
from specjax.layers.cache.full import FullCache, FullKind
from specjax.layers.context import Context
from specjax.layers.linear import linear
from specjax.layers.norm import rms_norm
from specjax.layers.packing import Packing, spread
from specjax.layers.rope import RopeConfig, apply_rope

Weight = Any  # ParamSpec, jax.Array, ShapeDtypeStruct, or None where the weight does not exist


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Sizes and switches of one block.

    Attributes:
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: size of a head; read from the configuration, never derived where it is given.
        mlp: width of the MLP.
        eps: of the norms.
        rope: how positions turn queries and keys.
        qk_norm: whether queries and keys are normalised per head.
        whole_norm: the norm spans all heads at once, before the split (MiniMax).
        attention_bias: biases on q, k, v and o.
        mlp_bias: biases on gate, up and down.
        inputs: width of the attention's input, 0 for `hidden`.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    eps: float
    rope: RopeConfig
    qk_norm: bool = False
    whole_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    inputs: int = 0

    @property
    def cache(self) -> FullKind:
        """The cache of its attention."""
        return FullKind(self.kv_heads, self.head_dim, self.head_dim)

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        qk_norm: bool,
        whole_norm: bool = False,
        inputs: int = 0,
    ) -> BlockConfig:
        """Read a published `config.json` of a Llama- or Qwen3-style model.

        Raises:
            CheckpointError: a field is missing, or asks for something this block does not do.
        """
        hidden, heads, width = required(
            config, "hidden_size", "num_attention_heads", "intermediate_size"
        )
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise CheckpointError(f"config.json: hidden_act {act!r} is not supported; have 'silu'")
        if config.get("use_sliding_window") or any(
            kind != "full_attention" for kind in config.get("layer_types") or ()
        ):
            raise CheckpointError("config.json: sliding-window layers are not supported here")
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: {heads} heads do not divide over {kv_heads} key-value heads"
            )
        head_dim = config.get("head_dim") or hidden // heads
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=width,
            eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config, head_dim),
            qk_norm=qk_norm,
            whole_norm=whole_norm,
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            inputs=inputs,
        )


@struct.dataclass
class AttentionWeights:
    """Projections of an attention layer, `[out, in]` as published."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    q_bias: Weight = None
    k_bias: Weight = None
    v_bias: Weight = None
    o_bias: Weight = None
    q_norm: Weight = None
    k_norm: Weight = None

    @classmethod
    def abstract(cls, config: BlockConfig, prefix: str) -> AttentionWeights:
        """Return the specs under the published prefix, e.g. `model.layers.0.self_attn.`."""
        inputs = config.inputs or config.hidden
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def matrix(name: str, out: int, into: int, axes: tuple[str, str]) -> ParamSpec:
            return ParamSpec((out, into), axes, f"{prefix}{name}.weight")

        def bias(name: str, size: int, axis: str) -> ParamSpec | None:
            if not config.attention_bias:
                return None
            return ParamSpec((size,), (axis,), f"{prefix}{name}.bias", init="zeros")

        def norm(name: str, whole: int) -> ParamSpec | None:
            if not config.qk_norm:
                return None
            size = whole if config.whole_norm else config.head_dim
            return ParamSpec((size,), (None,), f"{prefix}{name}.weight", init="ones")

        return cls(
            q=matrix("q_proj", wide, inputs, ("heads", "embed")),
            k=matrix("k_proj", narrow, inputs, ("kv_heads", "embed")),
            v=matrix("v_proj", narrow, inputs, ("kv_heads", "embed")),
            o=matrix("o_proj", config.hidden, wide, ("embed", "heads")),
            q_bias=bias("q_proj", wide, "heads"),
            k_bias=bias("k_proj", narrow, "kv_heads"),
            v_bias=bias("v_proj", narrow, "kv_heads"),
            o_bias=bias("o_proj", config.hidden, "embed"),
            q_norm=norm("q_norm", wide),
            k_norm=norm("k_norm", narrow),
        )


@struct.dataclass
class MlpWeights:
    """A gated MLP, `[out, in]` as published."""

    gate: Weight
    up: Weight
    down: Weight
    gate_bias: Weight = None
    up_bias: Weight = None
    down_bias: Weight = None

    @classmethod
    def abstract(cls, hidden: int, width: int, prefix: str, biased: bool = False) -> MlpWeights:
        """Return the specs under the published prefix, e.g. `model.layers.0.mlp.`."""

        def matrix(name: str, out: int, into: int, axes: tuple[str, str]) -> ParamSpec:
            return ParamSpec((out, into), axes, f"{prefix}{name}.weight")

        def bias(name: str, size: int, axis: str) -> ParamSpec | None:
            if not biased:
                return None
            return ParamSpec((size,), (axis,), f"{prefix}{name}.bias", init="zeros")

        return cls(
            gate=matrix("gate_proj", width, hidden, ("mlp", "embed")),
            up=matrix("up_proj", width, hidden, ("mlp", "embed")),
            down=matrix("down_proj", hidden, width, ("embed", "mlp")),
            gate_bias=bias("gate_proj", width, "mlp"),
            up_bias=bias("up_proj", width, "mlp"),
            down_bias=bias("down_proj", hidden, "embed"),
        )


@struct.dataclass
class LayerWeights:
    """One decoder layer."""

    attention: AttentionWeights
    mlp: MlpWeights
    input_norm: Weight
    post_norm: Weight

    @classmethod
    def abstract(cls, config: BlockConfig, prefix: str) -> LayerWeights:
        """Return the specs under the published prefix, e.g. `model.layers.0.`."""
        return cls(
            attention=AttentionWeights.abstract(config, f"{prefix}self_attn."),
            mlp=MlpWeights.abstract(config.hidden, config.mlp, f"{prefix}mlp.", config.mlp_bias),
            input_norm=norm_spec(config.hidden, f"{prefix}input_layernorm.weight"),
            post_norm=norm_spec(config.hidden, f"{prefix}post_attention_layernorm.weight"),
        )


def norm_spec(size: int, name: str) -> ParamSpec:
    """Return the spec of a norm's weight."""
    return ParamSpec((size,), ("embed",), name, init="ones")


def project_qkv(
    weights: AttentionWeights,
    config: BlockConfig,
    x: Float[Array, "B T I"],
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    packing: Packing | None = None,
) -> tuple[Float[Array, "B M T D"], Float[Array, "B N T D"], Float[Array, "B N T D"]]:
    """Project to (queries, keys, values), heads before positions, norm and rope applied.

    With a `packing` x is `[1, N, I]`.
    """

    def heads(w: Weight, bias: Weight, norm: Weight = None) -> jax.Array:
        y = linear(x, w, bias)
        if norm is not None and config.whole_norm:
            y = rms_norm(y, norm, config.eps)
        y = spread(packing, y)
        y = y.reshape(*y.shape[:-1], -1, config.head_dim)
        if norm is not None and not config.whole_norm:
            y = rms_norm(y, norm, config.eps)
        return y.transpose(0, 2, 1, 3)

    q = heads(weights.q, weights.q_bias, weights.q_norm)
    k = heads(weights.k, weights.k_bias, weights.k_norm)
    v = heads(weights.v, weights.v_bias)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def attention(
    weights: AttentionWeights,
    config: BlockConfig,
    x: Float[Array, "B T H"],
    ctx: Context,
    entry: FullCache | None,
) -> tuple[Float[Array, "B T H"], tuple[jax.Array, jax.Array]]:
    """Attend from T new positions to the cache and to each other.

    Returns:
        (`[B, T, H]`, (keys, values)) with the new keys and values `[B, N, T, D]`.
    """
    q, k, v = project_qkv(weights, config, x, *ctx.rope(config.rope), ctx.packing)
    cached = [] if entry is None else [config.cache.read(entry, ctx.lengths, ctx.positions)]
    kind = k.dtype if entry is None else entry.k.dtype  # one dtype, as they will be cached
    blocks = [*cached, KeyBlock(k.astype(kind), v.astype(kind), ctx.causal)]
    mixed = ctx.attend(q, blocks, config.head_dim**-0.5)
    return linear(ctx.pack(mixed), weights.o, weights.o_bias), (k, v)


def mlp(weights: MlpWeights, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """Apply the gated MLP `down(silu(gate x) * up x)`."""
    gate = linear(x, weights.gate, weights.gate_bias)
    up = linear(x, weights.up, weights.up_bias)
    return linear(jax.nn.silu(gate) * up, weights.down, weights.down_bias)


@dataclasses.dataclass(frozen=True)
class DenseLayer:
    """The layer itself: `kind` of every layer of Llama and Qwen3, see `targets.decoder`."""

    block: BlockConfig
    label: ClassVar[str] = "full"

    @property
    def cache(self) -> FullKind:
        """What it keeps of its past."""
        return self.block.cache

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope tables it needs."""
        return (self.block.rope,)

    def abstract(self, prefix: str) -> LayerWeights:
        """Return its weight table."""
        return LayerWeights.abstract(self.block, prefix)

    def run(
        self, weights: LayerWeights, x: jax.Array, ctx: Context, entry: FullCache | None, index: Any
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Run T new positions through the layer."""
        del index
        eps = self.block.eps
        normed = rms_norm(x, weights.input_norm, eps)
        y, new = attention(weights.attention, self.block, normed, ctx, entry)
        x = x + y
        return x + mlp(weights.mlp, rms_norm(x, weights.post_norm, eps)), new
