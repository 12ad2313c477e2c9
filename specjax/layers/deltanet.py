"""The gated delta-net layer of Qwen3.5: a state per head instead of keys and values of the past.

Per value head, with decay in (0, 1) and beta in (0, 1), each token does

    S = decay S;  S += k (beta (v - S^T k))^T;  o = S^T q

Token by token that is T small products in a row. Here a chunk of tokens is done at once: what each
token adds, w = beta (v - S^T k), depends on the earlier tokens of its chunk through a triangular
system, which is inverted, and on what came before the chunk through the state alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.errors import CheckpointError
from specjax.core.params import ParamSpec
from specjax.core.sharding import Layout, constrain
from specjax.layers.cache.recurrent import (
    RecurrentCache,
    RecurrentKind,
    RecurrentUpdate,
    advance,
)
from specjax.layers.documents import Documents
from specjax.layers.linear import linear, linear_f32
from specjax.layers.norm import rms_norm
from specjax.layers.packing import Packing, pack, spread

Weight = Any  # ParamSpec, jax.Array or ShapeDtypeStruct

_L2_EPS = 1e-6  # fixed in the published models, whatever the norms' epsilon
_FORGET = -1e4  # a log decay after which exactly 0 is left; infinite, its products are NaN
_BLOCK = 16  # rows solved one by one; larger systems are put together from such blocks


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of one layer.

    Attributes:
        hidden: width H of the residual stream.
        key_heads: heads N of queries and keys.
        value_heads: heads M of values and states; value head m uses key head `m // (M / N)`.
        key_dim: size of a query and a key D.
        value_dim: size of a value E.
        conv_kernel: taps K of the convolution over queries, keys and values.
        eps: of the norm of the output.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    eps: float

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                f"config.json: linear_num_value_heads {self.value_heads} is no multiple of"
                f" linear_num_key_heads {self.key_heads}"
            )
        if self.conv_kernel < 2:
            raise CheckpointError(
                f"config.json: linear_conv_kernel_dim is {self.conv_kernel}; it must be 2 or more"
            )

    @property
    def cache(self) -> RecurrentKind:
        """What the layer keeps of its past."""
        sizes = (self.key_heads, self.value_heads, self.key_dim, self.value_dim)
        return RecurrentKind(*sizes, self.conv_kernel)


@struct.dataclass
class DeltaNetWeights:
    """Weights of one layer, matrices `[out, in]` as published.

    Attributes:
        qkv: `[C, H]` queries, keys, values, C = 2 N D + M E.
        z: `[M E, H]` the gate of the output.
        b: `[M, H]` beta before its sigmoid.
        a: `[M, H]` how fast a head forgets, by token.
        out: `[H, M E]`.
        conv: `[C, 1, K]` one filter per channel.
        norm: `[E]` float32, a plain weight (Qwen3.5's other norms are stored as offsets).
        a_log: `[M]` float32, how fast a head forgets.
        dt_bias: `[M]` float32.
    """

    qkv: Weight
    z: Weight
    b: Weight
    a: Weight
    out: Weight
    conv: Weight
    norm: Weight
    a_log: Weight
    dt_bias: Weight

    @classmethod
    def abstract(cls, config: DeltaNetConfig, prefix: str) -> DeltaNetWeights:
        """Return the specs of the layer under `prefix`, e.g. `model.layers.0.`."""
        prefix = f"{prefix}linear_attn."
        channels, values = config.cache.channels, config.value_heads * config.value_dim

        def into_heads(name: str, out: int) -> ParamSpec:
            axes = ("heads", "embed")
            return ParamSpec((out, config.hidden), axes, f"{prefix}{name}.weight")

        def per_head(name: str, init: str) -> ParamSpec:
            shape, axes = (config.value_heads,), ("heads",)
            return ParamSpec(shape, axes, f"{prefix}{name}", init=init, dtype="float32")

        norm = f"{prefix}norm.weight"
        return cls(
            qkv=into_heads("in_proj_qkv", channels),
            z=into_heads("in_proj_z", values),
            b=into_heads("in_proj_b", config.value_heads),
            a=into_heads("in_proj_a", config.value_heads),
            out=ParamSpec((config.hidden, values), ("embed", "heads"), f"{prefix}out_proj.weight"),
            conv=ParamSpec(
                (channels, 1, config.conv_kernel), (None, None, None), f"{prefix}conv1d.weight"
            ),
            norm=ParamSpec((config.value_dim,), (None,), norm, init="ones", dtype="float32"),
            a_log=per_head("A_log", "zeros"),
            dt_bias=per_head("dt_bias", "ones"),
        )


def delta_net(
    weights: DeltaNetWeights,
    config: DeltaNetConfig,
    x: Float[Array, "B T H"],
    valid: Int[Array, " B"],
    entry: RecurrentCache | None,
    chunk: int = 64,
    packing: Packing | None = None,
    documents: Documents | None = None,
    layout: Layout | None = None,
) -> tuple[Float[Array, "B T H"], RecurrentUpdate]:
    """Run T new tokens through the layer; the cache is only read.

    Args:
        weights: of the layer.
        config: its sizes.
        x: normed residual stream.
        valid: real new tokens per row; what stands at the pads behind them has no influence.
        entry: what the layer knows of its past, None for the beginning of a text.
        chunk: at most so many tokens are solved at once. Up to that many tokens are one chunk of
            their own length; longer inputs are cut into equal ones.
        packing: with one, x and what is returned first are `[1, N, H]`.
        documents: the texts of each row; at the start of each, state and convolution are empty.
        layout: how weights lie on a mesh; None on one device.

    Returns:
        (the shape and dtype of `x`, zeros at pads; what commit needs). All but the
        projections is computed in float32.
    """
    batch, length = x.shape[:2] if packing is None else packing.index.shape
    key_heads, value_heads = config.key_heads, config.value_heads
    real = jnp.arange(length) < valid[:, None]
    if packing is None:
        x = jnp.where(real[..., None], x, 0)
    u = jnp.where(real[..., None], spread(packing, linear(x, weights.qkv)), 0)
    if entry is None:
        entry = config.cache.empty(batch, 0, u.dtype.name)
    # Queries, keys and values stand behind each other: their heads do not lie where the product
    # that made them is split. All are gathered once, and each device goes on with its heads.
    u = constrain(layout, u, ("batch", None, None))
    u = u.astype(entry.tail.dtype)  # as it will be cached: chunkings do not differ by rounding
    mixed = jax.nn.silu(_convolve(entry.tail, u, weights.conv, documents))

    def heads(part: jax.Array, count: int) -> jax.Array:
        part = constrain(layout, part, ("batch", None, None))
        split = part.reshape(batch, length, count, -1).swapaxes(1, 2)
        return constrain(layout, split, ("batch", "heads", None, None))

    keys = key_heads * config.key_dim
    q, k = (heads(part, key_heads) for part in (mixed[..., :keys], mixed[..., keys : 2 * keys]))
    v = heads(mixed[..., 2 * keys :], value_heads)
    q, k = _unit(q) * config.key_dim**-0.5, _unit(k)
    pace = jax.nn.softplus(spread(packing, linear_f32(x, weights.a)) + weights.dt_bias)
    # A pad neither forgets nor adds: a decay of 1 and a beta of 0.
    log_decay = jnp.where(real[..., None], -jnp.exp(weights.a_log) * pace, 0.0).swapaxes(1, 2)
    if documents is not None:
        log_decay = jnp.where(documents.first[:, None], _FORGET, log_decay)
    beta = jax.nn.sigmoid(spread(packing, linear_f32(x, weights.b)))
    beta = jnp.where(real[..., None], beta, 0.0).swapaxes(1, 2)
    o, w = delta_rule(q, k, v, log_decay, beta, entry.state, chunk)
    y = pack(packing, rms_norm(o.swapaxes(1, 2), weights.norm, config.eps))
    y = y * jax.nn.silu(linear_f32(x, weights.z)).reshape(y.shape)
    y = linear(y.reshape(*y.shape[:2], -1).astype(x.dtype), weights.out)
    return y, RecurrentUpdate(k=k, w=w, log_decay=log_decay, u=u)


def delta_rule(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B N T D"],
    v: Float[Array, "B M T E"],
    log_decay: Float[Array, "B M T"],
    beta: Float[Array, "B M T"],
    state: Float[Array, "B M D E"],
    chunk: int = 64,
) -> tuple[Float[Array, "B M T E"], Float[Array, "B M T E"]]:
    """Apply the gated delta rule to T tokens; everything is float32.

    Returns:
        (what the states say to the queries, what each token adds: `w` of `RecurrentUpdate`).
    """
    length = k.shape[2]
    chunks = -(-length // chunk)
    if chunks == 1:
        return _chunk_rule(q, k, v, log_decay, beta, state)
    size = -(-length // chunks)

    def cut(x: jax.Array) -> jax.Array:
        """Cut axis 2 into chunks, which come first; tokens that fill up the last are pads."""
        x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * size - length)] + [(0, 0)] * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(*x.shape[:2], chunks, size, *x.shape[3:]), 2, 0)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], chunks * size, x.shape[-1])[:, :, :length]

    def step(state: jax.Array, xs: tuple[jax.Array, ...]) -> Any:
        q, k, v, log_decay, beta = xs
        o, w = _chunk_rule(q, k, v, log_decay, beta, state)
        return advance(state, k, w, log_decay), (o, w)

    _, (o, w) = jax.lax.scan(step, state, tuple(cut(x) for x in (q, k, v, log_decay, beta)))
    return join(o), join(w)


def _chunk_rule(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B N T D"],
    v: Float[Array, "B M T E"],
    log_decay: Float[Array, "B M T"],
    beta: Float[Array, "B M T"],
    state: Float[Array, "B M D E"],
) -> tuple[Float[Array, "B M T E"], Float[Array, "B M T E"]]:
    """Apply the rule to one chunk at once (see `delta_rule`).

    With c(j, i) the decay behind token j up to token i, and c(i) that since the chunk's start,

        w_i = beta_i (v_i - c(i) S^T k_i - sum_{j<i} c(j, i) (k_i k_j) w_j)
        o_i = c(i) S^T q_i + sum_{j<=i} c(j, i) (q_i k_j) w_j
    """
    size, groups = k.shape[2], v.shape[1] // k.shape[1]

    def per_value_head(x: jax.Array) -> jax.Array:
        # Repeating once costs XLA a loop over single elements, hence the question.
        return x if groups == 1 else jnp.repeat(x, groups, axis=1)

    sums = _sums_between(log_decay)
    decay, since = jnp.exp(sums[..., 1:]), jnp.exp(sums[..., :1])
    own = per_value_head(_product("bnid,bnjd->bnij", k, k)) * decay
    reads = per_value_head(_product("bnid,bnjd->bnij", q, k)) * decay
    inverse = unit_lower_inverse(jnp.tril(own, -1) * beta[..., None])
    # One pass over the states for queries and keys: of few tokens that is most of the work.
    both = per_value_head(jnp.concatenate([q, k], axis=2))
    before = _product("bmid,bmde->bmie", both, state)
    q_before, k_before = since * before[:, :, :size], since * before[:, :, size:]
    w = _product("bmij,bmje->bmie", inverse, beta[..., None] * (v - k_before))
    return q_before + _product("bmij,bmje->bmie", jnp.tril(reads), w), w


def unit_lower_inverse(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """Return `(1 + lower)^-1` of strictly lower triangular matrices.

    Blocks of 16 rows are solved row by row, all at once; then neighbours are joined, since
    `[[P, 0], [L, R]]^-1 = [[P^-1, 0], [-R^-1 L P^-1, R^-1]]`. Made of products, so that heads stay
    where they are sharded. A power series would need as little but cancels: equal keys that are
    not forgotten have terms up to 1e18 in a chunk of 64.
    LAPACK's solver for the same (32 systems of 64 rows, 2 CPU cores) takes 0.8 ms, or 350 when its
    threads get in the way of XLA's; this 0.5.
    """
    size, width = lower.shape[-1], _BLOCK
    if size <= width:
        return _by_rows(lower)
    whole = width
    while whole < size:
        whole *= 2
    lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, whole - size)] * 2)

    def blocks(width: int, down: int, every: int) -> jax.Array:
        """Return the blocks of that width, `down` below the diagonal, at every so many."""
        at = range(0, whole // width, every)
        cut = [
            lower[..., (i + down) * width : (i + down + 1) * width, i * width : (i + 1) * width]
            for i in at
        ]
        return jnp.stack(cut, axis=-3)

    inverse = _by_rows(blocks(width, 0, 1))
    while width < whole:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _product("...ij,...jk->...ik", blocks(width, 1, 2), first)
        below = -_product("...ij,...jk->...ik", second, below)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :size, :size]


def _by_rows(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """Return `(1 + lower)^-1`, row i from the rows before it."""
    size = lower.shape[-1]

    def row(i: jax.Array, inverse: jax.Array) -> jax.Array:
        factors = jax.lax.dynamic_slice_in_dim(lower, i, 1, axis=-2).swapaxes(-1, -2)
        own = jnp.arange(size) == i
        new = own - jnp.sum(factors * inverse, axis=-2, keepdims=True)
        return jax.lax.dynamic_update_slice_in_dim(inverse, new, i, axis=-2)

    return jax.lax.fori_loop(0, size, row, jnp.zeros_like(lower))


def _sums_between(x: Float[Array, "*B C"]) -> Float[Array, "*B C D"]:
    """Return `[.., C, C+1]`: at (i, j) the sum of x_j to x_i, 0 where j > i.

    Each is a sum of its own numbers, not a difference of two long ones, which after a token that
    forgets everything would have no digits left for the mild decays behind it.
    """
    size = x.shape[-1]
    inside = jnp.arange(size)[:, None] >= jnp.arange(size + 1)  # [m, j]
    masked = jnp.where(inside, x[..., None], 0.0)
    return _product("im,...mj->...ij", jnp.tri(size), masked)


def _convolve(
    tail: Float[Array, "B J C"],
    u: Float[Array, "B T C"],
    filters: Float[Array, "C 1 K"],
    documents: Documents | None = None,
) -> Float[Array, "B T C"]:
    """Convolve each channel with its filter over [tail | u] in float32, documents apart."""
    length = u.shape[1]
    past = jnp.concatenate([tail, u], axis=1).astype(jnp.float32)
    filters = filters[:, 0].astype(jnp.float32)
    mixed = jnp.zeros(u.shape, jnp.float32)
    for tap in range(filters.shape[-1]):
        part = past[:, tap : tap + length] * filters[:, tap]
        if documents is not None:
            part = jnp.where(documents.reached(filters.shape[-1] - 1 - tap)[..., None], part, 0)
        mixed += part
    return mixed


def _unit(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Scale vectors to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)


def _product(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(letters, left, right, precision=jax.lax.Precision.HIGHEST)
