"""What one decoder layer is to the loops that run it: in targets, and in heads that have layers."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from specjax.layers.cache.base import CacheKind
from specjax.layers.context import Context
from specjax.layers.rope import RopeConfig

PyTree = Any


class LayerKind(Protocol):
    """What one layer is: frozen, hashable, equal for layers that share a scan.

    Attributes:
        cache: what the layer keeps, None where it reads another layer's keys and values.
        ropes: rope configurations whose tables it needs.
        label: which kind of attention it is, for layers that share keys and values: a layer
            without a cache reads what the last layer of its label with one had.
    """

    @property
    def cache(self) -> CacheKind | None:
        """What it keeps of its past."""
        ...

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope tables it needs."""
        ...

    @property
    def label(self) -> str:
        """The kind of its attention, as records name it."""
        ...

    def abstract(self, prefix: str) -> PyTree:
        """Return its weight table under `prefix`, e.g. `model.layers.0.`."""
        ...

    def run(
        self, weights: PyTree, x: jax.Array, ctx: Context, entry: PyTree, index: int | jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Run T new positions through the layer: (residual stream, what commit needs)."""
        ...
