"""What every layer of one forward pass shares: positions, rope tables, masks, attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.sharding import Layout
from specjax.layers.attention import attend, causal_mask
from specjax.layers.documents import Documents
from specjax.layers.packing import Packing, pack, spread
from specjax.layers.rope import RopeConfig, rope_tables

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Context:
    """One forward pass over T new positions behind `lengths` cached ones.

    Attributes:
        lengths: `[B]` committed positions per row.
        valid: `[B]` real new positions per row; the rest are pads on the right.
        positions: `[B, T]` their places in the sequence, in their document where rows pack several.
        ropes: the tables of each rope configuration in the model.
        causal: `[1, T, T]`, or `[B, T, T]` with documents: which new positions see each other.
        attend: the attention function, see `layers.attention.attend`.
        shared: keys and values that later layers read: label to (cache entry, new), filled in by
            the layer loop.
        extra: what a family computes once for all of its layers.
        packing: the residual stream holds the real positions alone, `[1, N, H]`; None: `[B, T, H]`.
        documents: the texts of each row, None where it is one.
        layout: how weights lie on a mesh; None on one device.
    """

    lengths: Int[Array, " B"]
    valid: Int[Array, " B"]
    positions: Int[Array, "B T"]
    ropes: Mapping[RopeConfig, tuple[jax.Array, jax.Array]]
    causal: Bool[Array, "b T T"]
    attend: Callable[..., jax.Array] = attend
    shared: Mapping[str, tuple[PyTree, PyTree]] = dataclasses.field(default_factory=dict)
    extra: PyTree = None
    packing: Packing | None = None
    documents: Documents | None = None
    layout: Layout | None = None

    @classmethod
    def of(
        cls,
        lengths: Int[Array, " B"],
        valid: Int[Array, " B"],
        length: int,
        ropes: Iterable[RopeConfig] = (),
        attend: Callable[..., jax.Array] = attend,
        packing: Packing | None = None,
        documents: Documents | None = None,
        layout: Layout | None = None,
    ) -> Context:
        """Return the context of `length` new positions, every rope table computed once.

        With `documents` nothing may be cached: `lengths` are 0.
        """
        if documents is None:
            positions = lengths[:, None] + jnp.arange(length)[None]
        else:
            positions = documents.positions
        tables = {config: rope_tables(config, positions) for config in dict.fromkeys(ropes)}
        causal = causal_mask(length)
        if documents is not None:
            causal = causal & documents.together
        return cls(
            lengths=lengths,
            valid=valid,
            positions=positions,
            ropes=tables,
            causal=causal,
            attend=attend,
            packing=packing,
            documents=documents,
            layout=layout,
        )

    @property
    def real(self) -> Bool[Array, "B T"]:
        """Which new positions are real."""
        return jnp.arange(self.positions.shape[1])[None] < self.valid[:, None]

    def spread(self, x: Float[Array, "b t *F"]) -> Float[Array, "B T *F"]:
        """Lay a product of the residual stream out by rows, for what looks across positions."""
        return spread(self.packing, x)

    def pack(self, x: Float[Array, "B T *F"]) -> Float[Array, "b t *F"]:
        """Bring what was laid out by rows into the form of the residual stream."""
        return pack(self.packing, x)

    def rope(self, config: RopeConfig) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
        """Return (cos, sin) of the new positions."""
        return self.ropes[config]
