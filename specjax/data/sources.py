"""Rows of a data source: JSON lines, JSON, Parquet, a folder of these, `datasets`, the hub.

A source is text, and every row has a place ("file:line", "file, row 7") that messages name. Rows
are read one after the other, so that a source may be larger than memory. A row that is no JSON
object comes as the `RowError` that says so: whether it ends the run or is counted is for the
reader to decide.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax.core.errors import DataError

HUB = "hf://datasets/"
"""How a source on the hub begins; OWNER/NAME follows, then /CONFIG and :SPLIT where needed."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
"""Files that a folder is searched for."""

_OURS = (".settings.json", "dataset_info.json", "dataset_infos.json")
_SAVED = ("dataset_dict.json", "dataset_info.json")


class RowError(DataError):
    """A row that cannot be used.

    Attributes:
      reason: what is wrong, in a few words that many rows may share; they are counted by it.
    """

    def __init__(self, reason: str, message: str) -> None:
        """Keep the reason beside the message."""
        super().__init__(message)
        self.reason = reason


Row = tuple[str, dict[str, Any] | RowError]
"""The place of a row and the row, or what is wrong with it."""


def split_list(sources: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """The sources of a setting: text may name several with commas between, a tuple is as it is."""
    if isinstance(sources, str):
        return tuple(part.strip() for part in sources.split(",") if part.strip())
    return (str(sources),) if isinstance(sources, Path) else tuple(map(str, sources))


def read_rows(source: str | Path) -> Iterator[Row]:
    """Yield (place, row) of a source in its order.

    Args:
      source: a file (.parquet, .json; any other is JSON lines), a folder of .jsonl, .ndjson, .json
        and .parquet files (by name, subfolders too), a folder that `datasets` saved, or
        hf://datasets/OWNER/NAME[/CONFIG]. The last two take :SPLIT at the end; without it, train.

    Raises:
      DataError: nothing there, nothing in it, or it cannot be read.
    """
    path, split = _local(source)
    rows: Iterator[Row]
    if path is None:
        rows = _table(_from_hub(str(source)), str(source))
    elif path.is_dir() and _is_saved(path):
        rows = _table(_from_saved(path, split), str(source))
    elif path.is_dir():
        rows = (row for file in _inside(path) for row in _read_file(file))
    else:
        rows = _read_file(path)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{source} is empty: expected one JSON object a line or row")


def digest(sources: Iterable[str | Path]) -> str:
    """A digest of what the sources hold, in order; 12 hex digits.

    Files count by their bytes, a data set of the hub by its rows. Names do not count, but the
    order does.

    Raises:
      DataError: as `read_rows`.
    """
    total = hashlib.sha256()
    for source in sources:
        path, _ = _local(source)
        if path is None:
            rows = hashlib.sha256()
            for _, row in read_rows(source):
                rows.update(json.dumps(row, sort_keys=True, default=str).encode())
            total.update(rows.digest())
            continue
        saved = path.is_dir() and _is_saved(path)
        files = sorted(path.rglob("*.arrow")) if saved else _inside(path)
        for file in files:
            try:
                with file.open("rb") as handle:
                    total.update(hashlib.file_digest(handle, "sha256").digest())
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror}") from None
    return total.hexdigest()[:12]


def _local(source: str | Path) -> tuple[Path | None, str | None]:
    """The (path, split) of a source; no path for one on the hub."""
    text = str(source)
    if text.startswith(HUB):
        return None, None
    if text.startswith("hf://"):
        raise DataError(f"{text}: a data set of the hub is written {HUB}OWNER/NAME[:SPLIT]")
    path = Path(text).expanduser()
    if not path.exists() and ":" in text:
        folder, _, split = text.rpartition(":")
        if (found := Path(folder).expanduser()).is_dir() and _is_saved(found):
            return found, split
    if not path.exists():
        raise DataError(f"no such file: {path}")
    return path, None


def _is_saved(folder: Path) -> bool:
    """Whether `datasets` saved this folder (one split or several)."""
    return any((folder / name).is_file() for name in _SAVED)


def _inside(path: Path) -> list[Path]:
    """The data files of a folder in the order of their names; a file alone is its own."""
    if not path.is_dir():
        return [path]
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.suffix in SUFFIXES
        and not file.name.endswith(_OURS)
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise DataError(f"{path} holds no file ending in {', '.join(SUFFIXES)}")
    return files


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        return _table(_from_parquet(path), str(path))
    return _json(path) if path.suffix == ".json" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # also a line that is not UTF-8
                message = f"{where}: not a line of JSON in UTF-8: {error}"
                yield where, RowError("not JSON in UTF-8", message)
                continue
            yield where, _object(where, row)


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, or one object; a .json file of several is read as JSON lines."""
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError:
        rows = None
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        yield from _json_lines(path)
        return
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        yield where, _object(where, row)


def _object(where: str, row: Any) -> dict[str, Any] | RowError:
    if isinstance(row, dict):
        return row
    message = f"{where}: expected a JSON object, found {type(row).__name__}"
    return RowError("not a JSON object", message)


def _table(data: Iterable[Any], name: str) -> Iterator[Row]:
    """The rows of a `datasets` table, without the keys that only other rows have."""
    try:
        for number, row in enumerate(data, 1):
            yield f"{name}, row {number}", _without_none(row)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise DataError(f"cannot read {name}: {_line(error)}") from None


def _without_none(value: Any) -> Any:
    """Arrow gives every object of a column the same keys: None stands for a missing one."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _from_parquet(path: Path) -> Iterable[Any]:
    import datasets

    try:  # streamed: no copy of the data in a cache
        return datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot read {path}: {_line(error)}") from None


def _from_saved(path: Path, split: str | None) -> Iterable[Any]:
    import datasets

    try:
        data = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {_line(error)}") from None
    if not isinstance(data, datasets.DatasetDict):
        if split is not None:
            raise DataError(f"{path} has no splits; leave out :{split}")
        return data
    if (split or "train") not in data:
        raise DataError(
            f"{path} has no split {split or 'train'!r} but {', '.join(data)}; name one as "
            f"{path}:{next(iter(data))}"
        )
    return data[split or "train"]


def _from_hub(source: str) -> Iterable[Any]:
    import datasets

    name, _, split = source.removeprefix(HUB).partition(":")
    owner, _, rest = name.partition("/")
    name, _, config = rest.partition("/")
    if not owner or not name:
        raise DataError(f"{source}: a data set of the hub is written {HUB}OWNER/NAME[:SPLIT]")
    try:
        return datasets.load_dataset(f"{owner}/{name}", config or None, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"cannot load {source}: {_line(error)}. Without a connection, give a file or folder"
        ) from None


def _line(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
