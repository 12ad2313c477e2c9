"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in its absorbed form.

    q = q_b(norm(q_a x));  [c | r] = kv_a x;  [k_h | v_h] = kv_b_h norm(c)

Every head's key and value are products of one latent c per position, next to a rope key r that all
heads share. Instead of expanding the cached latents, each query is carried over to the latent
space by its head's key half of kv_b, and each head's sum of latents back by the value half. What
remains is attention with a single key-value head, whose key is [c | r] and whose value is c.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.core.packed import dense
from specjax.core.params import ParamSpec
from specjax.core.published import required
from specjax.layers.attention import KeyBlock
from specjax.layers.cache.latent import LatentCache, LatentKind
from specjax.layers.context import Context
from specjax.layers.linear import linear
from specjax.layers.norm import rms_norm
from specjax.layers.rope import RopeConfig, apply_rope, apply_rope_interleaved, yarn_magnitude

Weight = Any  # ParamSpec, array, packed weight, or None where the weight does not exist

_INNER_EPS = 1e-6  # of the norms on the two latents, whatever the model's norms have


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Sizes and switches of a latent attention.

    Attributes:
        hidden: width of the residual stream.
        heads: heads M.
        kv_rank: size R of the latent that keys and values are made of.
        nope_dim: dims of a key that carry no position.
        v_dim: size of a head's value.
        rope: how positions turn the other dims of a key, `rope.dims` in number.
        scale: factor on the scores.
        eps: of the norms around the attention; those inside have 1e-6.
        q_rank: size of the queries' latent, None where queries are projected at once.
        attention_bias: biases on q_a, kv_a and o (no others).
        interleaved: the rope's pairs are (2i, 2i + 1).
    """

    hidden: int
    heads: int
    kv_rank: int
    nope_dim: int
    v_dim: int
    rope: RopeConfig
    scale: float
    eps: float
    q_rank: int | None = None
    attention_bias: bool = False
    interleaved: bool = True

    @property
    def cache(self) -> LatentKind:
        """What is cached of a position."""
        return LatentKind(self.kv_rank, self.rope.dims)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MlaConfig:
        """Read a published `config.json` of DeepSeek-V3's kind.

        Raises:
            CheckpointError: a field is missing, or its rope is not one we compute.
        """
        names = (
            "hidden_size",
            "num_attention_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        hidden, heads, kv_rank, nope_dim, rope_dim, v_dim = required(config, *names)
        rope = RopeConfig.from_hf(config, rope_dim)
        numbers = dict(rope.scaling)
        scale = (nope_dim + rope_dim) ** -0.5
        if stretched := numbers.get("mscale_all_dim"):
            scale *= yarn_magnitude(numbers["factor"], stretched) ** 2
        return cls(
            hidden=hidden,
            heads=heads,
            kv_rank=kv_rank,
            nope_dim=nope_dim,
            v_dim=v_dim,
            rope=rope,
            scale=scale,
            eps=float(config.get("rms_norm_eps", 1e-6)),
            q_rank=config.get("q_lora_rank"),
            attention_bias=bool(config.get("attention_bias", False)),
            interleaved=bool(config.get("rope_interleave", True)),
        )


@struct.dataclass
class MlaWeights:
    """Projections of a latent attention, `[out, in]` as published.

    Queries come from `q_a`, `q_a_norm` and `q_b`, or from `q` alone. The rows of `kv_b` are, head
    by head, first those of the key, then those of the value.
    """

    kv_a: Weight
    kv_a_norm: Weight
    kv_b: Weight
    o: Weight
    q: Weight = None
    q_a: Weight = None
    q_a_norm: Weight = None
    q_b: Weight = None
    q_a_bias: Weight = None
    kv_a_bias: Weight = None
    o_bias: Weight = None

    @classmethod
    def abstract(cls, config: MlaConfig, prefix: str) -> MlaWeights:
        """Return the specs under the published prefix, e.g. `model.layers.0.self_attn.`."""
        wide = config.heads * (config.nope_dim + config.rope.dims)
        expanded = config.heads * (config.nope_dim + config.v_dim)
        latent = config.kv_rank + config.rope.dims

        def matrix(
            name: str, out: int, into: int, axes: tuple[str | None, str | None]
        ) -> ParamSpec:
            return ParamSpec((out, into), axes, f"{prefix}{name}.weight")

        def norm(name: str, size: int) -> ParamSpec:
            return ParamSpec((size,), (None,), f"{prefix}{name}.weight", init="ones")

        def bias(name: str, size: int, axis: str | None) -> ParamSpec | None:
            if not config.attention_bias:
                return None
            return ParamSpec((size,), (axis,), f"{prefix}{name}.bias", init="zeros")

        queries: dict[str, Weight]
        if (rank := config.q_rank) is None:
            queries = {"q": matrix("q_proj", wide, config.hidden, ("heads", "embed"))}
        else:
            queries = {
                "q_a": matrix("q_a_proj", rank, config.hidden, (None, "embed")),
                "q_a_norm": norm("q_a_layernorm", rank),
                "q_b": matrix("q_b_proj", wide, rank, ("heads", None)),
                "q_a_bias": bias("q_a_proj", rank, None),
            }
        return cls(
            kv_a=matrix("kv_a_proj_with_mqa", latent, config.hidden, (None, "embed")),
            kv_a_norm=norm("kv_a_layernorm", config.kv_rank),
            kv_b=matrix("kv_b_proj", expanded, config.kv_rank, ("heads", None)),
            o=matrix("o_proj", config.hidden, config.heads * config.v_dim, ("embed", "heads")),
            kv_a_bias=bias("kv_a_proj_with_mqa", latent, None),
            o_bias=bias("o_proj", config.hidden, "embed"),
            **queries,
        )


def mla(
    weights: MlaWeights,
    config: MlaConfig,
    x: Float[Array, "B T H"],
    ctx: Context,
    entry: LatentCache | None,
) -> tuple[Float[Array, "B T H"], Float[Array, "B T C"]]:
    """Attend from T new positions to the cached latents and to each other.

    Returns:
        (`[B, T, H]`, the new positions' normed latents and turned rope keys `[B, T, R + P]`, which
        `LatentKind.write` appends).
    """
    cos, sin = ctx.rope(config.rope)
    turn = apply_rope_interleaved if config.interleaved else apply_rope
    q = _queries(weights, config, x, ctx)
    q_rope = turn(q[..., config.nope_dim :].transpose(0, 2, 1, 3), cos, sin)
    keys, values = _halves(weights, config, x.dtype)
    q_latent = _into_latent(q[..., : config.nope_dim], keys)

    both = ctx.spread(linear(x, weights.kv_a, weights.kv_a_bias))
    latent = rms_norm(both[..., : config.kv_rank], weights.kv_a_norm, _INNER_EPS)
    rope_key = turn(both[:, None, :, config.kv_rank :], cos, sin)[:, 0]
    new = jnp.concatenate([latent, rope_key], axis=-1)

    cached = [] if entry is None else [config.cache.read(entry, ctx.lengths, ctx.positions)]
    kind = new.dtype if entry is None else entry.latent.dtype  # as it will be cached
    fresh = new.astype(kind)[:, None]
    blocks = [*cached, KeyBlock(fresh, fresh, ctx.causal)]
    mixed = ctx.attend(jnp.concatenate([q_latent, q_rope], axis=-1), blocks, config.scale)
    mixed = mixed.reshape(*mixed.shape[:2], config.heads, -1)[..., : config.kv_rank]
    out = _out_of_latent(ctx.pack(mixed), values)
    return linear(out.reshape(*out.shape[:2], -1), weights.o, weights.o_bias), new


def _queries(
    weights: MlaWeights, config: MlaConfig, x: Float[Array, "b t H"], ctx: Context
) -> Float[Array, "B T M D"]:
    if config.q_rank is None:
        q = linear(x, weights.q)
    else:
        low = linear(x, weights.q_a, weights.q_a_bias)
        q = linear(rms_norm(low, weights.q_a_norm, _INNER_EPS), weights.q_b)
    q = ctx.spread(q)
    return q.reshape(*q.shape[:2], config.heads, -1)


def _halves(
    weights: MlaWeights, config: MlaConfig, dtype: Any
) -> tuple[Float[Array, "M N R"], Float[Array, "M V R"]]:
    """Return each head's key and value rows of kv_b.

    In a decode loop XLA keeps the two apart in memory beside kv_b. Reading kv_b whole for both
    would save that (0.2 % of DeepSeek-V3) but takes twice the products, and longer.
    """
    kv_b = dense(weights.kv_b, dtype).reshape(config.heads, -1, config.kv_rank)
    return kv_b[:, : config.nope_dim], kv_b[:, config.nope_dim :]


def _into_latent(
    q: Float[Array, "B T M N"], keys: Float[Array, "M N R"]
) -> Float[Array, "B M T R"]:
    """Carry queries over to the latent space; the weight stands left, the faster order on CPUs."""
    product = _product("mnr,btmn->bmtr", keys, _two_rows(q))
    return product[:, :, : q.shape[1]].astype(q.dtype)


def _out_of_latent(
    mixed: Float[Array, "B T M R"], values: Float[Array, "M V R"]
) -> Float[Array, "B T M V"]:
    """Turn each head's sum of latents into its sum of values."""
    product = _product("btmr,mvr->btmv", _two_rows(mixed), values)
    return product[:, : mixed.shape[1]].astype(mixed.dtype)


def _two_rows(x: Float[Array, "B T M I"]) -> Float[Array, "B U M I"]:
    """Double a single bfloat16 row, whose product has no kernel on CPUs (`layers.linear`)."""
    single = x.dtype == jnp.bfloat16 and x.shape[0] * x.shape[1] == 1
    return jnp.concatenate([x, x], axis=1) if single else x


def _product(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply with stated precision, accumulated in float32."""
    precision = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    return jnp.einsum(letters, left, right, precision=precision, preferred_element_type=jnp.float32)
