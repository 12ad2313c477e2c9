"""The cache of a latent-attention layer: one latent and one rope key per position.

Both stand side by side in one buffer, which serves as keys and as values of a single key-value
head. The columns of the rope key in the sum of values are computed and thrown away (an eighth more
work at 512 + 64): keeping two buffers, or slicing the latent out, costs a copy of the cache per
layer and round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.layers.attention import KeyBlock


@struct.dataclass
class LatentCache:
    """Latents of one layer, row b holding its first `lengths[b]` positions.

    Attributes:
        latent: `[B, S, R + P]`: the normed latent of R dims, then the turned rope key of P dims.
    """

    latent: Float[Array, "B S C"]

    # All heads read the same latents: nothing to split but the rows.
    AXES: ClassVar[Mapping[str, tuple[str | None, ...]]] = {"latent": ("batch", None, None)}


@dataclasses.dataclass(frozen=True)
class LatentKind:
    """The cache of a latent-attention layer.

    Attributes:
        rank: size of a latent R.
        rope_dim: size of the rope key P that all heads share.
    """

    rank: int
    rope_dim: int
    name: ClassVar[str] = "latent"

    def empty(self, batch: int, capacity: int, dtype: str) -> LatentCache:
        """Return an empty cache of `batch` rows."""
        return LatentCache(jnp.zeros((batch, capacity, self.rank + self.rope_dim), dtype))

    def read(
        self, entry: LatentCache, lengths: Int[Array, " B"], positions: Int[Array, "B T"]
    ) -> KeyBlock:
        """Return what queries at `positions` see: keys and values are the same `[B, 1, S, R + P]`.

        The first R dims of a sum of these values are the sum of latents.
        """
        del positions  # all of them come after everything cached
        seen = jnp.arange(entry.latent.shape[1])[None, None, :] < lengths[:, None, None]
        shared = entry.latent[:, None]
        return KeyBlock(shared, shared, seen)

    def write(
        self,
        entry: LatentCache,
        lengths: Int[Array, " B"],
        new: Float[Array, "B T C"],
        n: Int[Array, " B"],
    ) -> LatentCache:
        """Append the first `n[b]` new positions of row b; `n = 0` is a no-op.

        What is not appended is aimed past the end, where the scatter drops it.
        """
        capacity, step = entry.latent.shape[1], jnp.arange(new.shape[1])[None]
        at = jnp.where(step < n[:, None], lengths[:, None] + step, capacity + step)

        def append(buffer: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
            return buffer.at[at].set(rows.astype(buffer.dtype), mode="drop", unique_indices=True)

        return LatentCache(jax.vmap(append)(entry.latent, new, at))

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the memory that one committed token takes."""
        return (self.rank + self.rope_dim) * itemsize

    def bytes_fixed(self, itemsize: int) -> int:
        """Return the memory of a row that does not grow with it: none."""
        del itemsize
        return 0
