"""Several encoded rows in one row of a batch, so that few positions are pads.

How long the documents of a row are is fitted once, from the lengths of all rows: longest first,
each into the row with the least room that takes it. Seed and epoch decide which row of a length
goes where, and the order. So every epoch has as many batches, and any of them can be made at once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property

import numpy as np
from jaxtyping import Int

from specjax.data.chat import Encoded
from specjax.data.dataset import Batches, Position


def fit(lengths: Sequence[int], room: int) -> list[int]:
    """Put lengths into bins, each into the fullest that takes it.

    Args:
      lengths: descending, none above ``room``.
      room: what a bin holds.

    Returns:
      The bin of each length; bins are counted from 0.
    """
    by_room: list[list[int]] = [[] for _ in range(room + 1)]
    some = 0  # bit r is set where a bin with room for exactly r more is open
    bins, used = [], 0
    for length in lengths:
        roomier = some >> length
        if roomier:
            left = length + (roomier & -roomier).bit_length() - 1
            chosen = by_room[left].pop()
            if not by_room[left]:
                some ^= 1 << left
        else:
            left, chosen, used = room, used, used + 1
        left -= length
        by_room[left].append(chosen)
        some |= 1 << left
        bins.append(chosen)
    return bins


class PackedBatches(Batches):
    """Batches of one static length whose rows hold several documents each."""

    def __init__(
        self,
        rows: Sequence[Encoded],
        batch_size: int,
        length: int,
        seed: int = 0,
        shuffle: bool = True,
        pad_id: int = 0,
    ) -> None:
        """Check that the rows fit.

        Args:
          rows: the data, none longer than ``length``.
          batch_size: packed rows of a batch (B).
          length: the static length (S).
          seed: of the order.
          shuffle: false keeps rows of a length in order.
          pad_id: fills up rows.

        Raises:
          DataError: no rows, or sizes that do not fit.
        """
        self._ranked = np.empty(0, np.int64)  # rows by length, descending, in the epoch planned
        super().__init__(rows, batch_size, (length,), seed, shuffle, pad_id)

    @cached_property
    def _bins(self) -> list[Int[np.ndarray, " D"]]:
        """Per packed row the ranks of its documents among all, the longest of which has rank 0."""
        descending = np.sort(self._row_lengths)[::-1].tolist()
        bins = np.array(fit(descending, self.lengths[-1]))
        ranks = np.argsort(bins, kind="stable")
        return np.split(ranks, np.flatnonzero(np.diff(bins[ranks])) + 1)

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(static length, packed rows) of each batch of an epoch, in order."""
        if self._planned[0] == epoch:
            return self._planned[1]
        rng = np.random.default_rng([self.seed, epoch])
        order, rows = np.arange(len(self.rows)), np.arange(len(self._bins))
        if self.shuffle:
            rng.shuffle(order)
            rng.shuffle(rows)
        self._ranked = order[np.argsort(-self._row_lengths[order], kind="stable")]
        size = self.batch_size
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        self._planned = (epoch, [(self.lengths[-1], part) for part in parts])
        return self._planned[1]

    def members(self, position: Position) -> list[list[int]]:
        """Which of ``rows`` stand in each row of the batch at ``position``, from the left."""
        _, packed = self._plan(position.epoch)[position.step]
        return [self._ranked[self._bins[row]].tolist() for row in packed]

    def batch(
        self, position: Position, share: Container[int] | None = None
    ) -> dict[str, np.ndarray]:
        """The batch at ``position``, of which the rows in ``share`` are filled.

        Returns:
          What `Batches.batch` does ("lengths" counts all documents of a row), and "documents"
          int32 [B,S], the document of each position from 0 in each row, -1 for pads, and
          "positions" int32 [B,S], from 0 in each document.
        """
        batch = super().batch(position, share)
        documents = np.full(batch["input_ids"].shape, -1, np.int32)
        positions = np.zeros_like(documents)
        for b, members in self._shared(position, share):
            sizes = self._row_lengths[members]
            index = np.repeat(np.arange(len(sizes)), sizes)
            documents[b, : len(index)] = index
            positions[b, : len(index)] = np.arange(len(index)) - (np.cumsum(sizes) - sizes)[index]
        return {**batch, "documents": documents, "positions": positions}
