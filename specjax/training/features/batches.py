"""Batches with the target's features from a cache beside their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specjax.data.dataset import Batches, Position
from specjax.targets.base import TargetInfo
from specjax.training import fingerprint
from specjax.training.config import TrainerConfig
from specjax.training.features.store import FeatureStore, row_id
from specjax.training.features.streams import nothing, streams_of
from specjax.training.rows import TrainingData


class FeatureBatches(Batches):
    """Other batches, in their order, each with what is kept of its texts (`Stored`) beside them.

    Texts that share a row lie side by side there, as their tokens do.
    """

    def __init__(self, batches: Batches, store: FeatureStore) -> None:
        """Stand in for batches, all of whose rows the store has (`FeatureStore.check`)."""
        self._batches, self._store = batches, store
        self.rows, self.batch_size, self.lengths = batches.rows, batches.batch_size, batches.lengths
        self.steps_per_epoch = batches.steps_per_epoch
        self._ids = [row_id(row.ids) for row in batches.rows]

    @property
    def padding(self) -> float:
        """The share of positions that are pads."""
        return self._batches.padding

    def shape(self, position: Position) -> tuple[int, int]:
        """(B, S) of the batch at `position`."""
        return self._batches.shape(position)

    def members(self, position: Position) -> list[list[int]]:
        """Which of `rows` stand in each row of the batch at `position`."""
        return self._batches.members(position)

    def batch(self, position: Position, share: Container[int] | None = None) -> dict[str, Any]:
        """Return the batch at `position`, with a `Stored` of the same rows under "features".

        Only the features of the rows in `share` are read.

        Raises:
            DataError: features that are not those that were written.
        """
        batch: dict[str, Any] = self._batches.batch(position, share)
        kept = nothing(self._store.streams, self._store.storage, batch["input_ids"].shape)
        for b, members in self._shared(position, share):
            start = 0
            for member in members:
                text = self._store.read(self._ids[member])
                part = slice(start, start + len(text.states))
                kept.states[b, part] = text.states
                if kept.scales is not None:
                    kept.scales[b, part] = text.scales
                start = part.stop
        return {**batch, "features": kept}

    def iterate(
        self,
        position: Position | None = None,
        epochs: int | None = None,
        share: Container[int] | None = None,
    ) -> Iterator[tuple[dict[str, Any], Position]]:
        """Yield as `Batches` do; a batch is read while the one before it is in use."""
        stream = super().iterate(position, epochs, share)
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(next, stream, None)
            while (found := ahead.result()) is not None:
                ahead = pool.submit(next, stream, None)
                yield found


def from_cache(
    data: TrainingData, config: TrainerConfig, info: TargetInfo, head: Any
) -> TrainingData:
    """Return the data of a run with features from `config.features` in place of the target.

    Args:
        data: the run's rows.
        config: the run.
        info: its target's facts.
        head: says which features it wants.

    Raises:
        DataError: no cache there, or one that is damaged or of something else.
    """
    store = FeatureStore(config.features)
    names = [stream.name for stream in streams_of(info, head.taps, head.reads)]
    parts = [part for part in (data.train, data.heldout) if part is not None]
    rows = [row.ids for part in parts for row in part.rows]
    store.check(rows, names, fingerprint.of_features(config))
    return dataclasses.replace(
        data,
        train=FeatureBatches(data.train, store),
        heldout=None if data.heldout is None else FeatureBatches(data.heldout, store),
        report=f"{data.report}; the target's features from a cache in {store.storage}",
    )
