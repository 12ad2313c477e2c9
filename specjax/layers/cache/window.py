"""The cache of a sliding-window layer: a ring that holds the last keys and values.

Position p sits in slot `p mod R` of a ring of R slots. Which position a slot holds is derived from
the number of committed positions, so nothing has to be stored or cleared. Only accepted positions
enter: a rejected draft never evicts a key that is still needed.
"""

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
class WindowCache:
    """Rings of one layer, row b holding the last R of its first `lengths[b]` positions.

    Attributes:
        k: `[B, N, R, D]` keys.
        v: `[B, N, R, Dv]` values.
    """

    k: Float[Array, "B N R D"]
    v: Float[Array, "B N R E"]

    AXES: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "k": ("batch", "kv_heads", None, None),
        "v": ("batch", "kv_heads", None, None),
    }


def slot_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B R"]:
    """Return the position that each slot of a ring holds; negative where it is empty."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots


def slots_to_fill(
    lengths: Int[Array, " B"], n: Int[Array, " B"], new: int, slots: int
) -> Int[Array, "B T"]:
    """Return where each of `new` positions goes if the first `n[b]` are committed.

    Of more than `slots` only the last enter. What does not enter is aimed past the end, where the
    scatter drops it. No two positions share a slot: the order of writes would not be defined.
    """
    step = jnp.arange(new)[None]
    enters = (step < n[:, None]) & (step >= n[:, None] - slots)
    return jnp.where(enters, (lengths[:, None] + step) % slots, slots + step)


def window_block(
    entry: WindowCache, lengths: Int[Array, " B"], positions: Int[Array, "B T"], window: int
) -> KeyBlock:
    """Return what queries see of a ring: cached positions after `position - window`.

    Args:
        entry: the rings.
        lengths: committed positions per row.
        positions: of the queries; all of them come after what is cached.
        window: keys that a query sees, its own among them.

    Returns:
        The block with a mask `[B, T, R]`.
    """
    held = slot_positions(lengths, entry.k.shape[2])[:, None]
    seen = (held >= 0) & (held > positions[:, :, None] - window)
    return KeyBlock(entry.k, entry.v, seen)


def window_mask(length: int, window: int) -> Bool[Array, "1 T T"]:
    """Return the mask of new positions: query i sees key j iff `i - window < j <= i`."""
    at = jnp.arange(length)
    back = at[:, None] - at[None, :]
    return ((back >= 0) & (back < window))[None]


@dataclasses.dataclass(frozen=True)
class WindowKind:
    """The cache of a layer that sees the last `window` positions.

    Attributes:
        kv_heads: key-value heads N.
        k_dim: size of a key D.
        v_dim: size of a value Dv.
        window: keys that a query sees, its own among them.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int
    name: ClassVar[str] = "window"

    def empty(self, batch: int, capacity: int, dtype: str) -> WindowCache:
        """Return empty rings; shorter ones where not even a full cache would fill the window."""
        slots = min(self.window, capacity)
        return WindowCache(
            k=jnp.zeros((batch, self.kv_heads, slots, self.k_dim), dtype),
            v=jnp.zeros((batch, self.kv_heads, slots, self.v_dim), dtype),
        )

    def read(
        self, entry: WindowCache, lengths: Int[Array, " B"], positions: Int[Array, "B T"]
    ) -> KeyBlock:
        """Return what queries at `positions` see of the cache."""
        return window_block(entry, lengths, positions, self.window)

    def write(
        self,
        entry: WindowCache,
        lengths: Int[Array, " B"],
        new: tuple[Float[Array, "B N T D"], Float[Array, "B N T E"]],
        n: Int[Array, " B"],
    ) -> WindowCache:
        """Commit the first `n[b]` new keys and values of row b; of more than R the last R stay."""
        k, v = new
        at = slots_to_fill(lengths, n, k.shape[2], entry.k.shape[2])

        def put(ring: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
            return ring.at[:, at].set(rows.astype(ring.dtype), mode="drop", unique_indices=True)

        return WindowCache(k=jax.vmap(put)(entry.k, k, at), v=jax.vmap(put)(entry.v, v, at))

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the memory that a further committed token takes: none."""
        del itemsize
        return 0

    def bytes_fixed(self, itemsize: int) -> int:
        """Return the memory of a row's rings at their full length."""
        return self.window * self.kv_heads * (self.k_dim + self.v_dim) * itemsize
