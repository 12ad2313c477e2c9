"""The real positions of a ragged batch as one row of tokens, for products that pay per token.

A verification that admits few drafts has a ragged `[B, T]`: rows of different lengths, mostly pads.
Everything that acts on each position alone (norms, projections, MLPs, experts, the output layer)
runs on the N real positions, packed as `[1, N, F]`; attention and recurrences, which look across
positions, get them spread out to `[B, T, F]` again. Both ways are one gather.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class Packing:
    """Where the real positions of `[B, T]` stand among N packed ones.

    Attributes:
        rows: `[N]` batch row of each packed position; unused ones repeat a real one.
        slots: `[N]` its place in the row.
        index: `[B, T]` packed position of each slot; pads repeat some other's.
    """

    rows: Int[Array, " N"]
    slots: Int[Array, " N"]
    index: Int[Array, "B T"]

    @classmethod
    def of(cls, valid: Int[Array, " B"], length: int, size: int) -> Packing:
        """Return the packing of rows with `valid[b]` of `length` positions, row after row.

        Args:
            valid: real positions per row, at most `size` of them in all.
            length: T.
            size: N.
        """
        ends = jnp.cumsum(valid)
        starts = ends - valid
        index = jnp.minimum(starts[:, None] + jnp.arange(length), size - 1)
        at = jnp.arange(size)
        rows = jnp.minimum(jnp.searchsorted(ends, at, side="right"), valid.shape[0] - 1)
        slots = jnp.clip(at - starts[rows], 0, length - 1)
        return cls(rows=rows, slots=slots, index=index)

    def pack(self, x: Float[Array, "B T *F"]) -> Float[Array, "1 N *F"]:
        """Take the real positions together."""
        return x[self.rows, self.slots][None]

    def spread(self, x: Float[Array, "1 N *F"]) -> Float[Array, "B T *F"]:
        """Put packed positions back in their rows; what stands at the pads means nothing."""
        return x[0][self.index]


def pack(packing: Packing | None, x: jax.Array) -> jax.Array:
    """Pack `[B, T, ...]` if there is a packing."""
    return x if packing is None else packing.pack(x)


def spread(packing: Packing | None, x: jax.Array) -> jax.Array:
    """Spread `[1, N, ...]` if there is a packing."""
    return x if packing is None else packing.spread(x)
