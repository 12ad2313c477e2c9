"""The cache of a full-attention layer: every key and value, appended in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.layers.attention import KeyBlock


@struct.dataclass
class FullCache:
    """Keys and values of one layer, row b holding its first `lengths[b]` positions.

    Attributes:
        k: `[B, N, S, D]`, S the capacity. Heads before positions, so that attention reads rows
            in place instead of transposing the cache in every round.
        v: `[B, N, S, Dv]`.
    """

    k: Float[Array, "B N S D"]
    v: Float[Array, "B N S E"]

    AXES: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "k": ("batch", "kv_heads", None, None),
        "v": ("batch", "kv_heads", None, None),
    }


def empty(
    batch: int, kv_heads: int, capacity: int, k_dim: int, v_dim: int, dtype: str
) -> FullCache:
    """Return an empty cache; keys and values are separate buffers, so both can be donated."""
    return FullCache(
        k=jnp.zeros((batch, kv_heads, capacity, k_dim), dtype),
        v=jnp.zeros((batch, kv_heads, capacity, v_dim), dtype),
    )


def visible(cache: FullCache, lengths: Int[Array, " B"]) -> Bool[Array, "B 1 S"]:
    """Return the mask of cached positions, the same for every query of a row."""
    return jnp.arange(cache.k.shape[2])[None, None, :] < lengths[:, None, None]


def write(
    cache: FullCache,
    lengths: Int[Array, " B"],
    k: Float[Array, "B N T D"],
    v: Float[Array, "B N T E"],
    n: Int[Array, " B"],
) -> FullCache:
    """Append the first `n[b]` of T new positions of row b at position `lengths[b]`.

    Positions that are not appended are aimed past the end, where the scatter drops them; nothing
    else of the cache is touched. `n = 0` is a no-op.
    """
    capacity, new = cache.k.shape[2], k.shape[2]
    step = jnp.arange(new)[None, :]
    slots = jnp.where(step < n[:, None], lengths[:, None] + step, capacity + step)

    def append(buffer: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
        return buffer.at[:, at].set(rows.astype(buffer.dtype), mode="drop", unique_indices=True)

    return FullCache(k=jax.vmap(append)(cache.k, k, slots), v=jax.vmap(append)(cache.v, v, slots))


@dataclasses.dataclass(frozen=True)
class FullKind:
    """The cache of a layer that sees everything before it.

    Attributes:
        kv_heads: key-value heads N.
        k_dim: size of a key D.
        v_dim: size of a value Dv.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    name: ClassVar[str] = "full"

    def empty(self, batch: int, capacity: int, dtype: str) -> FullCache:
        """Return an empty cache of `batch` rows."""
        return empty(batch, self.kv_heads, capacity, self.k_dim, self.v_dim, dtype)

    def read(
        self, entry: FullCache, lengths: Int[Array, " B"], positions: Int[Array, "B T"]
    ) -> KeyBlock:
        """Return what queries at `positions` see of the cache."""
        del positions  # all of them come after everything cached
        return KeyBlock(entry.k, entry.v, visible(entry, lengths))

    def write(
        self,
        entry: FullCache,
        lengths: Int[Array, " B"],
        new: tuple[jax.Array, jax.Array],
        n: Int[Array, " B"],
    ) -> FullCache:
        """Append the first `n[b]` new keys and values of row b."""
        return write(entry, lengths, *new, n)

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the memory that one committed token takes."""
        return self.kv_heads * (self.k_dim + self.v_dim) * itemsize

    def bytes_fixed(self, itemsize: int) -> int:
        """Return the memory of a row that does not grow: none."""
        del itemsize
        return 0
