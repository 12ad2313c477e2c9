"""Filling a cache: the frozen target runs over every row once."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specjax.core.errors import CheckpointError, DataError
from specjax.targets.base import Target
from specjax.training import fingerprint
from specjax.training.config import TrainerConfig
from specjax.training.features.config import FeaturesConfig
from specjax.training.features.store import FeatureWriter, row_id
from specjax.training.features.streams import (
    Stored,
    Stream,
    bytes_per_token,
    keep,
    nothing,
    streams_of,
    taps_of,
)
from specjax.training.placement import Placement
from specjax.training.rows import TrainingData

_MIB = 1 << 20
Group = list["Row"]  # what a forward pass takes


class Row(NamedTuple):
    """A text to be run."""

    id: str
    ids: Int[np.ndarray, " S"]


def plan(rows: Sequence[Int[np.ndarray, " S"]], batch_size: int, tokens: int) -> list[list[Group]]:
    """Return the passes of each chunk: the same for the same texts, in whatever order they come.

    Long texts come first, so that neighbours are of a length and memory runs out at once or never.

    Args:
        rows: token ids; of equal ones one is kept.
        batch_size: texts of a pass.
        tokens: of a chunk, which has at least one pass.
    """
    texts = {row_id(ids): ids for ids in rows}
    order = sorted((Row(*text) for text in texts.items()), key=lambda row: (-len(row.ids), row.id))
    chunks: list[list[Group]] = []
    room = 0
    for at in range(0, len(order), batch_size):
        group = order[at : at + batch_size]
        size = sum(len(row.ids) for row in group)
        if size > room:
            chunks.append([])
            room = max(tokens, size)
        chunks[-1].append(group)
        room -= size
    return chunks


def fill(
    config: TrainerConfig,
    how: FeaturesConfig,
    target: Target,
    target_params: Any,
    wants: tuple[Sequence[int], Sequence[int]],
    data: TrainingData,
    console: Console,
) -> str:
    """Write the features of every row, or those that an interrupted run left.

    Args:
        config: the run that will train on them; `config.features` is the folder.
        how: what is kept, and how.
        target: the target.
        target_params: its weights, in `config.target_dtype`, where `place(config, how)` puts them.
        wants: taps and read layers to keep beside those that `how` names.
        data: the rows of that run.
        console: where estimate and progress are shown.

    Returns:
        A closing line.

    Raises:
        DataError: the folder holds something else, or the disk is too small or full.
    """
    streams = streams_of(target.info, (*how.taps, *wants[0]), (*how.reads, *wants[1]))
    token = bytes_per_token(streams, how.storage)
    parts = [part for part in (data.train, data.heldout) if part is not None]
    rows = [row.ids for part in parts for row in part.rows]
    chunks = plan(rows, how.batch_size, max(how.chunk_mib * _MIB // token, 1))
    sizes = [sum(len(row.ids) for group in chunk for row in group) for chunk in chunks]
    manifest = _manifest(config, how, streams, chunks)
    folder = Path(config.features).expanduser()
    with FeatureWriter(folder, manifest) as writer:
        left = writer.left()
        need = token * sum(sizes[n] for n in left)
        console.print(
            f"{sum(sizes):,} tokens of {manifest['rows']:,} rows, {token:,} bytes each "
            f"({', '.join(stream.name for stream in streams)}; {how.storage}): "
            f"{size_of(token * sum(sizes))}, files: {len(chunks)}"
            + (f", {len(chunks) - len(left)} there already" if len(left) < len(chunks) else ""),
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        free = shutil.disk_usage(folder).free
        if need > free:
            raise DataError(
                f"{folder} needs {size_of(need)} more and its disk has {size_of(free)} free: cache "
                "fewer rows or taps, or set Features.storage to fp8"
            )
        run = _Runner(target, target_params, streams, how, config)
        with _progress(console) as bar:
            task = bar.add_task("cache", total=sum(sizes[n] for n in left), shown="compiling")

            def advance(tokens: int) -> None:
                bar.update(task, advance=tokens)
                speed = bar.tasks[0].completed / max(bar.tasks[0].elapsed or 0, 1e-9)
                bar.update(task, shown=f"{speed:,.0f} tokens/s")

            for n in left:
                kept = run.chunk(chunks[n], sizes[n], advance)
                texts = [row for group in chunks[n] for row in group]
                try:
                    writer.write(n, [t.id for t in texts], [len(t.ids) for t in texts], kept)
                except CheckpointError as error:
                    done = len(chunks) - len(writer.left())
                    raise DataError(
                        f"{error}; {done} of {len(chunks)} files are written and stay: make room "
                        "and run the same command again"
                    ) from None
                if not console.is_terminal:
                    console.print(f"file {n + 1} of {len(chunks)}, {bar.tasks[0].fields['shown']}")
    return (
        f"{folder}: features of {manifest['rows']:,} rows, {sum(sizes):,} tokens, "
        f"{size_of(token * sum(sizes))}; train with Trainer.features={folder}"
    )


def place(config: TrainerConfig, how: FeaturesConfig) -> Placement:
    """Return the mesh that the target runs on."""
    return Placement.of(config.mesh, how.batch_size, "Features.batch_size")


class _Runner:
    """The compiled pass over the target; one compilation per static length."""

    def __init__(
        self,
        target: Target,
        params: Any,
        streams: tuple[Stream, ...],
        how: FeaturesConfig,
        config: TrainerConfig,
    ) -> None:
        self._params, self._streams, self._how = params, streams, how
        self._lengths, self._place = _lengths(config), place(config, how).batch

        def run(params: Any, tokens: jax.Array, valid: jax.Array) -> Stored:
            out = target.forward(params, tokens, valid, None, taps_of(streams))
            return keep(target, out, streams, how.storage)

        self._run = jax.jit(run)

    def chunk(self, groups: Sequence[Group], tokens: int, advance: Callable[[int], None]) -> Stored:
        """Return what is kept of a chunk's texts, one behind the other, on the host."""
        kept, at = nothing(self._streams, self._how.storage, (tokens,)), 0
        for group in groups:
            longest = max(len(row.ids) for row in group)
            ids = np.zeros(
                (self._how.batch_size, next(n for n in self._lengths if n >= longest)), np.int32
            )
            valid = np.zeros(self._how.batch_size, np.int32)
            for b, row in enumerate(group):
                ids[b, : len(row.ids)], valid[b] = row.ids, len(row.ids)
            found = jax.device_get(self._run(self._params, *self._place((ids, valid))))
            for b, n in enumerate(valid[: len(group)]):
                kept.states[at : at + n] = found.states[b, :n]
                if kept.scales is not None:
                    kept.scales[at : at + n] = found.scales[b, :n]
                at += int(n)
            advance(int(valid.sum()))
        return kept


def _manifest(
    config: TrainerConfig,
    how: FeaturesConfig,
    streams: Sequence[Stream],
    chunks: Sequence[Sequence[Group]],
) -> dict[str, Any]:
    """What the cache holds, and all that its bytes depend on."""
    rows = [row for chunk in chunks for group in chunk for row in group]
    return {
        **fingerprint.of_features(config),
        "target_options": dataclasses.asdict(config.target_options),
        "streams": {stream.name: list(stream.shape) for stream in streams},
        "storage": how.storage,
        "rows": len(rows),
        "tokens": sum(len(row.ids) for row in rows),
        "texts": hashlib.sha256("".join(row.id for row in rows).encode()).hexdigest()[:12],
        "batch_size": how.batch_size,
        "lengths": list(_lengths(config)),
        "chunk_mib": how.chunk_mib,
        "chunks": len(chunks),
    }


def _lengths(config: TrainerConfig) -> tuple[int, ...]:
    """The static lengths of the passes; no rows are packed."""
    return dataclasses.replace(config.data, pack=False).buckets()


def size_of(number: float) -> str:
    """Return a number of bytes in words."""
    power = min(int(math.log(max(number, 1), 1000)), 4)
    return f"{number / 1000**power:.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("tokens"),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
