"""Several texts in one row: which positions belong together, and where each text begins.

Training packs short texts so that few positions are pads. A packed forward pass gives for each
text what the text gives alone: attention is masked to the text, rope counts from its start, and a
recurrence forgets everything there.
"""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Documents:
    """The documents of packed rows; each is contiguous.

    Attributes:
        index: `[B, T]` document of each position, counted from 0 in each row; -1: padding.
        positions: `[B, T]` places in the document, from 0.
    """

    index: Int[Array, "B T"]
    positions: Int[Array, "B T"]

    @property
    def first(self) -> Bool[Array, "B T"]:
        """Which positions begin a document."""
        return (self.positions == 0) & (self.index >= 0)

    @property
    def together(self) -> Bool[Array, "B T T"]:
        """Which positions are of one document; padding is of none."""
        same = self.index[:, :, None] == self.index[:, None, :]
        return same & (self.index >= 0)[:, None, :]

    def reached(self, back: int) -> Bool[Array, "B T"]:
        """Which positions have one of their document `back` places before them."""
        return self.positions >= back
