"""The pre-norm decoder block of Llama and Qwen3: grouped-query attention and a SwiGLU MLP.

    x += o(attn(norm(x; input_norm)));  x += down(silu(gate y) * up y), y = norm(x; post_norm)

Qwen3 adds a norm per head on queries and keys. EAGLE-3's layer is the same attention and MLP on a
wider input (`AttentionConfig.inputs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float

from specjax.core.errors import CheckpointError
from specjax.core.params import ParamSpec
from specjax.layers.attention import KeyBlock, OwnKey, attend
from specjax.layers.linear import linear
from specjax.layers.norm import rms_norm
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
    attention_bias: bool = False
    mlp_bias: bool = False
    inputs: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, qk_norm: bool, inputs: int = 0) -> BlockConfig:
        """Read a published `config.json` of a Llama- or Qwen3-style model.

        Raises:
            CheckpointError: a field is missing, or asks for something this block does not do.
        """
        missing = [
            name
            for name in ("hidden_size", "num_attention_heads", "intermediate_size")
            if config.get(name) is None
        ]
        if missing:
            raise CheckpointError(f"config.json lacks {', '.join(missing)}")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise CheckpointError(f"config.json: hidden_act {act!r} is not supported; have 'silu'")
        if config.get("use_sliding_window") or any(
            kind != "full_attention" for kind in config.get("layer_types") or ()
        ):
            raise CheckpointError("config.json: sliding-window layers are not supported here")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
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
            mlp=config["intermediate_size"],
            eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config, head_dim),
            qk_norm=qk_norm,
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

        def norm(name: str) -> ParamSpec | None:
            if not config.qk_norm:
                return None
            return ParamSpec((config.head_dim,), (None,), f"{prefix}{name}.weight", init="ones")

        return cls(
            q=matrix("q_proj", wide, inputs, ("heads", "embed")),
            k=matrix("k_proj", narrow, inputs, ("kv_heads", "embed")),
            v=matrix("v_proj", narrow, inputs, ("kv_heads", "embed")),
            o=matrix("o_proj", config.hidden, wide, ("embed", "heads")),
            q_bias=bias("q_proj", wide, "heads"),
            k_bias=bias("k_proj", narrow, "kv_heads"),
            v_bias=bias("v_proj", narrow, "kv_heads"),
            o_bias=bias("o_proj", config.hidden, "embed"),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
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
    def abstract(cls, config: BlockConfig, prefix: str) -> MlpWeights:
        """Return the specs under the published prefix, e.g. `model.layers.0.mlp.`."""

        def matrix(name: str, out: int, into: int, axes: tuple[str, str]) -> ParamSpec:
            return ParamSpec((out, into), axes, f"{prefix}{name}.weight")

        def bias(name: str, size: int, axis: str) -> ParamSpec | None:
            if not config.mlp_bias:
                return None
            return ParamSpec((size,), (axis,), f"{prefix}{name}.bias", init="zeros")

        return cls(
            gate=matrix("gate_proj", config.mlp, config.hidden, ("mlp", "embed")),
            up=matrix("up_proj", config.mlp, config.hidden, ("mlp", "embed")),
            down=matrix("down_proj", config.hidden, config.mlp, ("embed", "mlp")),
            gate_bias=bias("gate_proj", config.mlp, "mlp"),
            up_bias=bias("up_proj", config.mlp, "mlp"),
            down_bias=bias("down_proj", config.hidden, "embed"),
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
            mlp=MlpWeights.abstract(config, f"{prefix}mlp."),
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
) -> tuple[Float[Array, "B M T D"], Float[Array, "B N T D"], Float[Array, "B N T D"]]:
    """Project to (queries, keys, values), heads before positions, norm and rope applied."""

    def heads(w: Weight, bias: Weight, count: int) -> jax.Array:
        y = linear(x, w, bias)
        return y.reshape(*y.shape[:-1], count, config.head_dim)

    q = heads(weights.q, weights.q_bias, config.heads)
    k = heads(weights.k, weights.k_bias, config.kv_heads)
    v = heads(weights.v, weights.v_bias, config.kv_heads)
    if config.qk_norm:
        q = rms_norm(q, weights.q_norm, config.eps)
        k = rms_norm(k, weights.k_norm, config.eps)
    q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def attention_output(
    weights: AttentionWeights,
    config: BlockConfig,
    q: Float[Array, "B M T D"],
    blocks: Sequence[KeyBlock | OwnKey],
) -> Float[Array, "B T H"]:
    """Attend and project back to the residual stream."""
    mixed = attend(q, blocks, config.head_dim**-0.5)
    return linear(mixed, weights.o, weights.o_bias)


def mlp(weights: MlpWeights, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """Apply the gated MLP `down(silu(gate x) * up x)`."""
    gate = linear(x, weights.gate, weights.gate_bias)
    up = linear(x, weights.up, weights.up_bias)
    return linear(jax.nn.silu(gate) * up, weights.down, weights.down_bias)


def decoder_layer(
    weights: LayerWeights,
    config: BlockConfig,
    x: Float[Array, "B T H"],
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    cached: Sequence[KeyBlock],
    new_mask: jax.Array,
) -> tuple[Float[Array, "B T H"], tuple[jax.Array, jax.Array]]:
    """Run one layer over T new positions.

    Args:
        weights: the layer's weights.
        config: its sizes.
        x: residual stream.
        cos: rope table of the new positions.
        sin: rope table of the new positions.
        cached: blocks of what the cache holds (empty without a cache).
        new_mask: bool, broadcastable to `[B, T, T]`: which new positions see each other.

    Returns:
        (residual stream, (keys, values)) with the new keys and values `[B, N, T, D]`.
    """
    normed = rms_norm(x, weights.input_norm, config.eps)
    q, k, v = project_qkv(weights.attention, config, normed, cos, sin)
    kind = cached[0].k.dtype if cached else k.dtype  # one dtype, as they will be cached
    blocks = [*cached, KeyBlock(k.astype(kind), v.astype(kind), new_mask)]
    x = x + attention_output(weights.attention, config, q, blocks)
    x = x + mlp(weights.mlp, rms_norm(x, weights.post_norm, config.eps))
    return x, (k, v)
