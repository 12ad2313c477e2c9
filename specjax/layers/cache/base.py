"""What a layer's cache is to the decoder: made, read by its layer, written by commit alone."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from jaxtyping import Array, Int

PyTree = Any


class CacheKind(Protocol):
    """The static description of one layer's cache: a frozen, hashable dataclass.

    Attributes:
        name: "full", "window", "latent" or "recurrent".
    """

    name: ClassVar[str]

    def empty(self, batch: int, capacity: int, dtype: str) -> PyTree:
        """Return an entry of `batch` rows; every leaf has the rows on axis 0."""
        ...

    def write(
        self, entry: PyTree, lengths: Int[Array, " B"], new: PyTree, n: Int[Array, " B"]
    ) -> PyTree:
        """Commit the first `n[b]` new positions of row b; 0 leaves the row as it is."""
        ...

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the memory that each further committed token takes, at `itemsize` bytes."""
        ...

    def bytes_fixed(self, itemsize: int) -> int:
        """Return the memory of a row that does not grow with it: rings and states."""
        ...
