"""Encoded rows to fixed-shape training batches, in an order that (seed, epoch) alone decides.

Random access by (epoch, step) makes resume exact without stored state. (grain shuffles and
resumes too, but groups neither by length nor into a few static shapes, which jit wants.)
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from specjax.core.errors import DataError
from specjax.data.chat import Encoded


@dataclass(frozen=True)
class Position:
    """Place in the data: the batch that comes next. Saved with a checkpoint, it resumes exactly."""

    epoch: int = 0
    step: int = 0


class Batches:
    """Fixed-shape batches over encoded rows."""

    def __init__(
        self,
        rows: Sequence[Encoded],
        batch_size: int,
        lengths: Sequence[int],
        seed: int = 0,
        shuffle: bool = True,
        pad_id: int = 0,
    ) -> None:
        """Check that the rows fit.

        Args:
          rows: the data, none longer than the longest of ``lengths``.
          batch_size: rows of a batch (B).
          lengths: the static lengths (S), a few; a row goes to the shortest that holds it.
          seed: of the order.
          shuffle: false keeps the rows in order within a length.
          pad_id: fills up rows.

        Raises:
          DataError: no rows, or sizes that do not fit.
        """
        self.rows, self.batch_size, self.lengths = rows, batch_size, tuple(sorted(set(lengths)))
        self.seed, self.shuffle, self.pad_id = seed, shuffle, pad_id
        self._row_lengths = np.array([len(row.ids) for row in rows], dtype=np.int64)
        longest = int(self._row_lengths.max(initial=0))
        if batch_size < 1 or not rows or longest > max(self.lengths, default=0):
            raise DataError(
                f"{len(rows)} rows of up to {longest} tokens do not fit batches of {batch_size} "
                f"with lengths {self.lengths}"
            )
        self._planned: tuple[int, list[tuple[int, np.ndarray]]] = (-1, [])
        self.steps_per_epoch = len(self._plan(0))

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(static length, rows) of each batch of an epoch, in order; always as many batches."""
        if self._planned[0] == epoch:
            return self._planned[1]
        rng = np.random.default_rng([self.seed, epoch])
        order = np.arange(len(self.rows))
        if self.shuffle:
            rng.shuffle(order)
        bucket = np.searchsorted(self.lengths, self._row_lengths[order])
        plan: list[tuple[int, np.ndarray]] = []
        rest = order[:0]
        for index, length in enumerate(self.lengths):
            # What does not fill a batch of its length joins the next longer one.
            members = np.concatenate([rest, order[bucket == index]])
            full = len(members) // self.batch_size * self.batch_size
            plan += [(length, part) for part in members[:full].reshape(-1, self.batch_size)]
            rest = members[full:]
        if len(rest):
            longest = self._row_lengths[rest].max()
            plan.append((next(n for n in self.lengths if n >= longest), rest))
        if self.shuffle:
            plan = [plan[i] for i in rng.permutation(len(plan))]
        self._planned = (epoch, plan)
        return plan

    @property
    def padding(self) -> float:
        """The share of positions that are pads, in the first epoch."""
        room = sum(length for length, _ in self._plan(0)) * self.batch_size
        return 1 - float(self._row_lengths.sum()) / room

    def shape(self, position: Position) -> tuple[int, int]:
        """(B, S) of the batch at ``position``."""
        return self.batch_size, self._plan(position.epoch)[position.step][0]

    def members(self, position: Position) -> list[list[int]]:
        """Which of ``rows`` stand in each row of the batch at ``position``, from the left.

        At most ``batch_size`` rows; those that are missing are empty.
        """
        _, members = self._plan(position.epoch)[position.step]
        return [[int(member)] for member in members]

    def tokens(self, position: Position) -> int:
        """How many tokens the batch at ``position`` has, pads not counted."""
        return sum(len(self.rows[i].ids) for row in self.members(position) for i in row)

    def batch(
        self, position: Position, share: Container[int] | None = None
    ) -> dict[str, np.ndarray]:
        """The batch at ``position``.

        Args:
          position: which.
          share: the rows of the batch that are filled, for a process that needs no others; None
            for all. Those left out are as long, and empty.

        Returns:
          {"input_ids": int32 [B,S], "loss_mask": bool [B,S], "lengths": int32 [B]}, right-padded.
          One batch of an epoch may end in rows of length 0, so that its shape is static too.
        """
        shape = self.shape(position)
        ids: Int[np.ndarray, "B S"] = np.full(shape, self.pad_id, np.int32)
        mask: Bool[np.ndarray, "B S"] = np.zeros(shape, bool)
        lengths: Int[np.ndarray, " B"] = np.zeros(self.batch_size, np.int32)
        for b, members in self._shared(position, share):
            for row in (self.rows[member] for member in members):
                part = slice(int(lengths[b]), int(lengths[b]) + len(row.ids))
                ids[b, part], mask[b, part] = row.ids, row.mask
                lengths[b] = part.stop
        return {"input_ids": ids, "loss_mask": mask, "lengths": lengths}

    def _shared(
        self, position: Position, share: Container[int] | None
    ) -> Iterator[tuple[int, list[int]]]:
        """The rows of a batch that are filled, with their members."""
        rows = enumerate(self.members(position))
        return ((b, members) for b, members in rows if share is None or b in share)

    def iterate(
        self,
        position: Position | None = None,
        epochs: int | None = None,
        share: Container[int] | None = None,
    ) -> Iterator[tuple[dict[str, np.ndarray], Position]]:
        """Yield (batch, position after it) from ``position`` on, up to ``epochs`` epochs in all.

        Only the rows in ``share`` are filled, see `batch`.
        """
        now = position or Position()
        while epochs is None or now.epoch < epochs:
            batch = self.batch(now, share)
            last = now.step + 1 == self.steps_per_epoch
            now = Position(now.epoch + 1) if last else Position(now.epoch, now.step + 1)
            yield batch, now
