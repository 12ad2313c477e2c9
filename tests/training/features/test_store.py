import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.core.errors import DataError
from specjax.training import fingerprint
from specjax.training.features.store import FeatureStore, FeatureWriter, row_id
from tests.training import toy
from tests.training.features.cached import fill, make_config, make_data

ROWS = [row.ids for row in toy.make_rows()]
NAMES = ["tap 1", "tap 3", "hidden"]


@pytest.fixture(scope="module", params=["bfloat16", "fp8"])
def made(request: Any, target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    fill(make_config(folder), target, storage=request.param)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to damage; `folder`/cache is the cache."""
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def now(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**fingerprint.of_features(make_config(folder)), **changes}


def read_all(folder: Path) -> None:
    """What a training run does: check, then read row by row."""
    store = FeatureStore(folder / "cache")
    store.check(ROWS, NAMES, now(folder))
    for ids in ROWS:
        store.read(row_id(ids))


def note_of(chunk: Path) -> dict[str, Any]:
    return json.loads(chunk.with_suffix(".json").read_text())


def last_chunk(folder: Path) -> Path:
    chunks = sorted((folder / "cache").glob("*.safetensors"))
    assert len(chunks) >= 3 and len(note_of(chunks[-2])["ids"]) > 2
    return chunks[-2]


def test_a_text_is_known_by_its_tokens() -> None:
    ids = np.arange(7, dtype=np.int32)
    assert row_id(ids) == row_id(ids.astype(np.int64)) != row_id(ids[:-1])
    assert len({row_id(ids[:n]) for n in range(8)}) == 8


def test_every_row_has_all_its_tokens(made: Path) -> None:
    store = FeatureStore(made / "cache")
    store.check(ROWS, NAMES, now(made))
    for ids in ROWS:
        assert len(store.read(row_id(ids)).states) == len(ids)
    assert store.manifest["tokens"] == sum(place.text.length for place in store.places.values())


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_f16_a_cut_file_is_refused_by_the_rows_it_lacks(folder: Path, share: float) -> None:
    """F16: a feature file cut to half; the first row named is not whole in what is left."""
    chunk = last_chunk(folder)
    whole, note = FeatureStore(folder / "cache"), note_of(chunk)
    kept = {id_: np.asarray(whole.read(id_).states).tobytes() for id_ in note["ids"]}
    content = chunk.read_bytes()
    chunk.write_bytes(content[: int(len(content) * share)])
    left = chunk.read_bytes()
    gone = [id_ for id_ in note["ids"] if kept[id_] not in left]
    with pytest.raises(DataError, match="are not whole there") as caught:
        read_all(folder)
    assert f"text {gone[0]} and those behind it" in str(caught.value)
    chunk.unlink()
    with pytest.raises(DataError, match=f"has 0 of {len(content):,} bytes: text {note['ids'][0]}"):
        read_all(folder)


def test_f16_features_of_a_prefix_are_refused_by_id(folder: Path) -> None:
    """F16: the note itself says that fewer tokens are there than the row has."""
    chunk = last_chunk(folder)
    note = note_of(chunk)
    note["lengths"][1] //= 2
    chunk.with_suffix(".json").write_text(json.dumps(note))
    some, id_ = note["lengths"][1], note["ids"][1]
    with pytest.raises(DataError, match=rf"features of {some} of the \d+ tokens of text {id_}"):
        read_all(folder)


def test_f16_other_bytes_are_refused_by_id(folder: Path) -> None:
    chunk = last_chunk(folder)
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(DataError, match=f"text {note_of(chunk)['ids'][-1]} in .* are not those"):
        read_all(folder)


def test_an_unfinished_cache_is_refused(folder: Path) -> None:
    last_chunk(folder).with_suffix(".json").unlink()
    with pytest.raises(DataError, match=r"not finished, 1 of \d+ chunks are missing"):
        read_all(folder)
    sidecar = sorted((folder / "cache").glob("chunk-*.json"))[0]
    sidecar.write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        read_all(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "other"}, "something else: target was '.*', is now 'other'"),
        ({"target_dtype": "float32"}, "target_dtype was 'bfloat16', is now 'float32'"),
        ({"max_length": 12}, "max_length was 16, is now 12"),
        ({"tokenizer": "t", "data": "d"}, "tokenizer was .* is now 't'; data was .* is now 'd'"),
        ({"rendering": ["chatml", None, True]}, "rendering was None, is now"),
        ({}, "other rows of the same files"),
    ],
)
def test_features_of_something_else_are_refused(
    made: Path, change: dict[str, Any], message: str
) -> None:
    """With what differs; a row that is not there is what makes other data another cache."""
    with pytest.raises(DataError, match=message) as caught:
        FeatureStore(made / "cache").check([*ROWS, ROWS[0][:-1]], NAMES, now(made, **change))
    if not {"target", "target_dtype"} & change.keys():
        assert f"lacks 1 of 25 rows, the first is row 24 (text {row_id(ROWS[0][:-1])})" in str(
            caught.value
        )


def test_streams_that_are_not_there_are_refused(made: Path) -> None:
    with pytest.raises(DataError, match=r"has no tap 2, keys 0 .* it has tap 1, tap 3, hidden, k"):
        FeatureStore(made / "cache").check(ROWS, ["tap 2", "hidden", "keys 0"], now(made))


def test_no_cache(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no feature cache"):
        FeatureStore(tmp_path)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    manifest = {"chunks": 1, "storage": "fp8"}
    with (
        FeatureWriter(tmp_path, manifest),
        pytest.raises(DataError, match="another process fills"),
    ):
        FeatureWriter(tmp_path, manifest)
    with pytest.raises(DataError, match="storage was 'fp8', is now 'bfloat16'"):
        FeatureWriter(tmp_path, {**manifest, "storage": "bfloat16"})
    assert FeatureWriter(tmp_path, manifest).left() == [0]


def test_data_is_not_needed_twice(made: Path, target: Any) -> None:
    """Equal texts are kept once, and what is there is not made again."""
    before = {path.name: path.stat().st_mtime_ns for path in (made / "cache").glob("chunk-*")}
    storage = FeatureStore(made / "cache").storage
    twice = make_data([*toy.make_rows(), *toy.make_rows()])
    fill(make_config(made), (target[0], None), twice, storage=storage)  # weights are not touched
    after = {path.name: path.stat().st_mtime_ns for path in (made / "cache").glob("chunk-*")}
    assert before == after
