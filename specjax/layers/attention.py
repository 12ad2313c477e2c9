"""Attention as one softmax over several blocks of keys and values.

A query attends to what is cached, to the new positions of the same call and, in EAGLE-3's
training-time test, to its own earlier steps. Each is a block with a mask of its own; scores share
one maximum and one sum, so the result equals attention over the concatenation without building it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from specjax.core.errors import ConfigError

_NEGATIVE = -1e30  # finite: an empty row gives zeros below instead of NaN


@struct.dataclass
class KeyBlock:
    """Keys and values that many queries see.

    Attributes:
        k: `[B, N, S, D]` keys, N the number of key-value heads.
        v: `[B, N, S, Dv]` values.
        mask: bool, broadcastable to `[B, T, S]`: may query t see key s.
    """

    k: Float[Array, "B N S D"]
    v: Float[Array, "B N S E"]
    mask: Bool[Array, "b t S"]


@struct.dataclass
class OwnKey:
    """One key per query, seen by that query only (a chain of recurrent steps).

    Attributes:
        k: `[B, N, T, D]` keys, one per query position.
        v: `[B, N, T, Dv]` values.
    """

    k: Float[Array, "B N T D"]
    v: Float[Array, "B N T E"]


def _scores(q: jax.Array, block: KeyBlock | OwnKey, scale: float) -> jax.Array:
    """Return `[B, N, G, T, S]` float32 scores (S = 1 for an own key)."""
    if isinstance(block, OwnKey):
        k = block.k.astype(jnp.float32)
        return jnp.sum(q.astype(jnp.float32) * k[:, :, None], axis=-1, keepdims=True) * scale
    # The queries of a key-value head are rows of one product: on a CPU nearly twice as fast as
    # a product with two free dims.
    rows = q.astype(block.k.dtype).reshape(*q.shape[:2], -1, q.shape[-1])
    scores = _product("bnxd,bnsd->bnxs", rows, block.k).reshape(*q.shape[:4], -1)
    return jnp.where(block.mask[:, None, None], scores * scale, _NEGATIVE)


def _values(weights: jax.Array, block: KeyBlock | OwnKey) -> jax.Array:
    """Return `[B, N, G, T, Dv]` float32 sums of values under unnormalised weights."""
    if isinstance(block, OwnKey):
        return weights * block.v.astype(jnp.float32)[:, :, None]
    rows = weights.astype(block.v.dtype).reshape(*weights.shape[:2], -1, weights.shape[-1])
    return _product("bnxs,bnse->bnxe", rows, block.v).reshape(*weights.shape[:4], -1)


def _product(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply with stated precision, accumulated in float32."""
    precision = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    return jnp.einsum(letters, left, right, precision=precision, preferred_element_type=jnp.float32)


def attend(
    q: Float[Array, "B M T D"], blocks: Sequence[KeyBlock | OwnKey], scale: float
) -> Float[Array, "B T F"]:
    """Attend from `q` to all `blocks` at once.

    Args:
        q: queries, M = G * N heads; head m reads key-value head `m // G`.
        blocks: keys, values and masks; a query that sees nothing at all gives zeros.
        scale: factor on the scores.

    Returns:
        `[B, T, M * Dv]` in the dtype of `q`; softmax and sums in float32.
    """
    batch, heads, length, _ = q.shape
    kv_heads = blocks[0].k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, length, q.shape[-1])
    scores = [_scores(grouped, block, scale) for block in blocks]
    top = scores[0].max(-1, keepdims=True)
    for more in scores[1:]:
        top = jnp.maximum(top, more.max(-1, keepdims=True))
    top = jnp.maximum(jax.lax.stop_gradient(top), _NEGATIVE / 2)
    weights = [jnp.exp(s - top) for s in scores]
    total = sum(w.sum(-1, keepdims=True) for w in weights)
    mixed = sum(_values(w, block) for w, block in zip(weights, blocks, strict=True))
    out = mixed / jnp.maximum(total, 1e-30)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1).astype(q.dtype)


def attend_dot_product(
    q: Float[Array, "B M T D"], blocks: Sequence[KeyBlock | OwnKey], scale: float
) -> Float[Array, "B T F"]:
    """Attend as `attend` does, by `jax.nn.dot_product_attention` over the concatenated blocks.

    For platforms where one call on a copy of the keys is faster than several products in place.
    An own key becomes a block with a diagonal mask; of keys and values of different sizes the
    smaller are padded with zeros.

    Raises:
        TypeError: keys and values are held in neither float32 nor bfloat16.
    """
    batch, _, length, _ = q.shape
    shared = [_as_block(block, length) for block in blocks]
    kind = jnp.result_type(*(x for block in shared for x in (block.k, block.v)))
    if kind not in (jnp.float32, jnp.bfloat16):  # jax compiles its float16 on some platforms only
        raise TypeError(f"attention 'dot_product' takes float32 or bfloat16, not {kind}")
    width = shared[0].v.shape[-1]
    wide = max(q.shape[-1], width)

    def line_up(parts: Sequence[jax.Array]) -> jax.Array:
        x = jnp.concatenate([part.astype(kind) for part in parts], axis=2)
        return jnp.pad(x, ((0, 0),) * 3 + ((0, wide - x.shape[-1]),)).transpose(0, 2, 1, 3)

    masks = [jnp.broadcast_to(b.mask, (batch, length, b.k.shape[2])) for b in shared]
    mask = jnp.concatenate(masks, axis=-1)
    # The function takes no precision: for float32 the surrounding default counts.
    with jax.default_matmul_precision("highest" if kind == jnp.float32 else "default"):
        out = jax.nn.dot_product_attention(
            line_up([q]),
            line_up([block.k for block in shared]),
            line_up([block.v for block in shared]),
            mask=mask[:, None],
            scale=scale,
        )
    # A softmax over masked scores alone is uniform; what sees nothing gives zeros.
    out = jnp.where(mask.any(-1)[..., None, None], out[..., :width], 0)
    return out.reshape(batch, length, -1).astype(q.dtype)


def _as_block(block: KeyBlock | OwnKey, length: int) -> KeyBlock:
    if isinstance(block, OwnKey):
        return KeyBlock(block.k, block.v, jnp.eye(length, dtype=bool)[None])
    return block


Attend = Callable[[jax.Array, Sequence[KeyBlock | OwnKey], float], jax.Array]
_BACKENDS: dict[str, Attend] = {"blocks": attend, "dot_product": attend_dot_product}


def attend_with(backend: str) -> Attend:
    """Return the attention function of a back end.

    Args:
        backend: "blocks" for `attend`, "dot_product" for `attend_dot_product`.

    Raises:
        ConfigError: there is no such back end.
    """
    if backend not in _BACKENDS:
        known = ", ".join(repr(name) for name in _BACKENDS)
        raise ConfigError(f"attention {backend!r} does not exist; have {known}")
    return _BACKENDS[backend]


def causal_mask(length: int) -> Bool[Array, "1 T T"]:
    """Return the mask `[1, T, T]`: query i sees key j of the same block iff j <= i."""
    at = jnp.arange(length)
    return (at[None, :] <= at[:, None])[None]
