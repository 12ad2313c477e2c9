"""The folder of a feature cache: chunks of whole texts, each there completely or not at all.

    features.json            what the cache holds, of what, and the plan of its chunks
    chunk-00000.safetensors  "states" [tokens, W], for fp8 "scales" [tokens, P] before it
    chunk-00000.json         written last: size of the file; id, length and crc32 of each text

A text is known by its token ids alone (`row_id`), so rows may come in any order, and several runs
with other masks, shuffles or held-out rows share a cache. Nothing is read on trust: a file whose
size is not the one noted, a text without all of its tokens or with other bytes than were written
is refused by the text's id.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Int
from safetensors import safe_open

from specjax.core.errors import CheckpointError, DataError
from specjax.io.hf import read_json, write_json, write_safetensors
from specjax.training.features.streams import Stored, Stream, bytes_per_token

MANIFEST = "features.json"
COMMAND = "scripts/cache_features.py"
_OPEN = 64  # chunks mapped at a time


class Text(NamedTuple):
    """A text of a chunk: its id, its tokens and the checksum of what is kept of them."""

    id: str
    length: int
    crc32: int


class Place(NamedTuple):
    """Where a text lies: the number of a chunk and the first token there."""

    chunk: int
    start: int
    text: Text


def row_id(ids: Int[np.ndarray, " S"]) -> str:
    """Return what a text is known by: a digest of its token ids."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<i4").tobytes()).hexdigest()[:20]


def checksum(states: np.ndarray, scales: np.ndarray | None) -> int:
    """Return the crc32 of a text's arrays."""
    found = zlib.crc32(np.ascontiguousarray(states).view(np.uint8).data)
    return found if scales is None else zlib.crc32(np.ascontiguousarray(scales).data, found)


def _chunk(folder: Path, number: int) -> Path:
    return folder / f"chunk-{number:05d}.safetensors"


def _texts(folder: Path, number: int) -> tuple[int, list[Text]] | None:
    """The noted size and texts of a chunk, None where it is not finished."""
    beside = _chunk(folder, number).with_suffix(".json")
    if not beside.exists():
        return None
    try:
        found = read_json(beside)
        columns = (found["ids"], found["lengths"], found["crc32"])
        return found["size"], [Text(*row) for row in zip(*columns, strict=True)]
    except (CheckpointError, KeyError, ValueError) as error:
        raise DataError(f"{beside} is damaged ({error}): remove it and run {COMMAND}") from None


class FeatureWriter:
    """Fills a cache; used by one process at a time, as a context manager."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Open or make the folder and see what is there; remains of a kill are removed.

        Args:
            folder: of the cache.
            manifest: what it will hold; what lies there must have the same.

        Raises:
            DataError: another process fills it, or it holds something else.
        """
        self.folder, self.manifest = folder, manifest
        folder.mkdir(parents=True, exist_ok=True)
        self._lock: IO[bytes] = (folder / ".lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another process fills {folder}") from None
        if (folder / MANIFEST).exists():
            refuse_changes(read_json(folder / MANIFEST), manifest, manifest, folder)
        else:
            write_json(manifest, folder / MANIFEST)
        for partial in folder.glob(".chunk-*"):
            partial.unlink()

    def __enter__(self) -> FeatureWriter:
        """Enter the context."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of the folder."""
        self._lock.close()

    def left(self) -> list[int]:
        """Return the numbers of the chunks that are not there, or not whole."""
        return [n for n in range(self.manifest["chunks"]) if not self._whole(n)]

    def _whole(self, number: int) -> bool:
        found, path = _texts(self.folder, number), _chunk(self.folder, number)
        return found is not None and path.exists() and path.stat().st_size == found[0]

    def write(self, number: int, ids: Sequence[str], lengths: Sequence[int], kept: Stored) -> None:
        """Write a chunk; it is on the disk when this returns.

        Args:
            number: of the chunk.
            ids: of its texts, in order.
            lengths: of its texts.
            kept: their tokens, one text after the other, on the host.

        Raises:
            CheckpointError: it could not be written; then there is none.
        """
        states = np.asarray(kept.states)
        scales = None if kept.scales is None else np.asarray(kept.scales)
        ends = np.cumsum(lengths)
        parts = [slice(int(end) - n, int(end)) for n, end in zip(lengths, ends, strict=True)]
        crc32 = [checksum(states[p], None if scales is None else scales[p]) for p in parts]
        path = _chunk(self.folder, number)
        write_safetensors(
            {"states": states, **({} if scales is None else {"scales": scales})}, path
        )
        _sync(path)
        note = {"size": path.stat().st_size, "ids": list(ids), "lengths": list(lengths)}
        write_json({**note, "crc32": crc32}, path.with_suffix(".json"))
        _sync(path.with_suffix(".json"))


def _sync(path: Path) -> None:
    """Bring a file and its name to the disk."""
    for place in (path, path.parent):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class FeatureStore:
    """Reads a cache, text by text."""

    def __init__(self, folder: str | Path) -> None:
        """Read what the cache holds; no features yet.

        Raises:
            DataError: no cache there, or a file that is not as long as it was written.
        """
        self.folder = Path(folder).expanduser()
        if not (self.folder / MANIFEST).is_file():
            raise DataError(f"{self.folder} holds no feature cache: {COMMAND} writes one")
        self.manifest = read_json(self.folder / MANIFEST)
        streams = self.manifest["streams"].items()
        self.streams = tuple(Stream(name, tuple(shape)) for name, shape in streams)
        self.storage: str = self.manifest["storage"]
        self.places: dict[str, Place] = {}
        self._unfinished = 0
        for number in range(self.manifest["chunks"]):
            found = _texts(self.folder, number)
            if found is None:
                self._unfinished += 1
                continue
            self._check_size(number, *found)
            start = 0
            for text in found[1]:
                self.places[text.id] = Place(number, start, text)
                start += text.length
        self._sound: set[str] = set()
        self._open = functools.lru_cache(_OPEN)(self._map)

    def _check_size(self, number: int, size: int, texts: Sequence[Text]) -> None:
        """Refuse a file that was cut: of some of its texts only a part is left (F16)."""
        path = _chunk(self.folder, number)
        there = path.stat().st_size if path.exists() else 0
        if there == size:
            return
        token = bytes_per_token(self.streams, self.storage)
        if self.storage == "fp8":  # the scales stand at the file's start
            token -= 4 * len(self.streams)
        behind = sum(text.length for text in texts)
        for text in texts:
            behind -= text.length
            if behind * token < size - there:
                break
        raise DataError(
            f"{path} has {there:,} of {size:,} bytes: text {text.id} and those behind it are not "
            f"whole there; the {COMMAND} that made the cache makes it anew"
        )

    def check(
        self,
        rows: Sequence[Int[np.ndarray, " S"]],
        names: Sequence[str],
        now: Mapping[str, Any],
    ) -> None:
        """Refuse to stand in for a run's target where anything of it is missing.

        Args:
            rows: token ids of every row of the run.
            names: the streams that its head wants.
            now: what the run is made from; entries that the manifest has too.

        Raises:
            DataError: another target or dtype, streams or rows that are not there, or a row whose
                features are not those of all its tokens.
        """
        refuse_changes(self.manifest, now, ("target", "target_dtype"), self.folder)
        have = [stream.name for stream in self.streams]
        if lacking := [name for name in names if name not in have]:
            raise DataError(
                f"{self.folder} has no {', '.join(lacking)} of the target, which the head wants; "
                f"it has {', '.join(have)}"
            )
        ids = [row_id(row) for row in rows]
        missing = [i for i, id_ in enumerate(ids) if id_ not in self.places]
        if missing and self._unfinished:
            raise DataError(
                f"{self.folder} is not finished, {self._unfinished} of {self.manifest['chunks']} "
                f"chunks are missing: the {COMMAND} that began it goes on"
            )
        if missing:
            why = _changes(self.manifest, now, now) or ["other rows of the same files"]
            raise DataError(
                f"{self.folder} lacks {len(missing)} of {len(rows)} rows, the first is row "
                f"{missing[0]} (text {ids[missing[0]]}): {'; '.join(why)}"
            )
        for id_, row in zip(ids, rows, strict=True):
            if (length := self.places[id_].text.length) != len(row):
                raise DataError(
                    f"{self.folder} has features of {length} of the {len(row)} tokens of text "
                    f"{id_}: remove chunk {self.places[id_].chunk} and run {COMMAND} again"
                )

    def read(self, id_: str) -> Stored:
        """Return what is kept of a text, on the host.

        Raises:
            DataError: other bytes than were written.
        """
        number, start, text = self.places[id_]
        part = slice(start, start + text.length)
        chunk = self._open(number)
        states = chunk["states"][part]
        scales = chunk["scales"][part] if "scales" in chunk else None
        if id_ not in self._sound:  # once in a run: it costs as much as reading
            if len(states) != text.length or checksum(states, scales) != text.crc32:
                raise DataError(
                    f"the features of text {id_} in {_chunk(self.folder, number)} are not those "
                    f"that were written: remove the file and run {COMMAND} again"
                )
            self._sound.add(id_)
        return Stored(states, scales, self.streams)

    def _map(self, number: int) -> dict[str, Any]:
        """The tensors of a chunk, mapped into memory and not yet read."""
        file = safe_open(_chunk(self.folder, number), framework="numpy")
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _changes(was: Mapping[str, Any], now: Mapping[str, Any], names: Any) -> list[str]:
    return [
        f"{name} was {was.get(name)!r}, is now {now.get(name)!r}"
        for name in names
        if was.get(name) != now.get(name)
    ]


def refuse_changes(was: Mapping[str, Any], now: Mapping[str, Any], names: Any, where: Path) -> None:
    """Refuse a cache of something else.

    Raises:
        DataError: names every entry of `names` that differs, with both values.
    """
    if changed := _changes(was, now, names):
        raise DataError(f"{where} holds features of something else: {'; '.join(changed)}")
