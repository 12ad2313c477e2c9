from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specjax.core.errors import ConfigError, DataError
from specjax.io import hf
from specjax.training.features import fill as filling
from specjax.training.features.config import FeaturesConfig
from specjax.training.features.fill import plan, size_of
from specjax.training.features.store import FeatureStore, row_id
from tests.training import toy
from tests.training.features.cached import HELDOUT, fill, make_config, make_data


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cache").iterdir()}


@pytest.fixture(scope="module")
def made(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    fill(make_config(folder), target)
    return folder


def test_plan() -> None:
    """Long texts first, whole passes, each text once, in whatever order the rows come."""
    rows = [row.ids for row in toy.make_rows(23)]
    chunks = plan(rows, 4, 60)
    groups = [group for chunk in chunks for group in chunk]
    assert [len(group) for group in groups] == [4] * 5 + [3]
    lengths = [len(row.ids) for group in groups for row in group]
    assert lengths == sorted(map(len, rows), reverse=True)
    assert {row.id for group in groups for row in group} == {row_id(ids) for ids in rows}
    sizes = [sum(len(row.ids) for group in chunk for row in group) for chunk in chunks]
    assert len(chunks) > 2 and max(sizes) <= 60
    again = plan([*rows[::-1], rows[5]], 4, 60)
    assert [[[r.id for r in g] for g in c] for c in again] == [
        [[r.id for r in g] for g in c] for c in chunks
    ]
    assert [len(chunk) for chunk in plan(rows, 4, 1)] == [1] * 6  # a pass is the least


def test_states_are_the_targets(made: Path, target: Any) -> None:
    """What is read back is a pass over the text alone, held-out rows included."""
    store = FeatureStore(made / "cache")
    for row in (toy.make_rows()[0], HELDOUT[-1]):
        out = target[0].forward(target[1], row.ids[None], taps=(1, 3))
        kept = store.read(row_id(row.ids))
        hidden, taps = kept.read("hidden", "float32"), kept.read("tap 3", "float32")
        np.testing.assert_allclose(hidden, out.hidden[0], rtol=8e-3, atol=1e-4)
        np.testing.assert_allclose(taps, out.taps[1, 0], rtol=8e-3, atol=1e-4)


def test_too_small_a_disk_is_refused_with_figures(
    tmp_path: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything runs: the weights are not touched."""
    monkeypatch.setattr(filling.shutil, "disk_usage", lambda _: SimpleNamespace(free=1500))
    with pytest.raises(DataError, match=r"needs \d+\.\d kB more and its disk has 1\.5 kB free"):
        fill(make_config(tmp_path), (target[0], None))


def test_a_disk_that_fills_up_can_be_gone_on_from(
    made: Path, tmp_path: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = hf.save_file, []

    def full(tensors: Any, path: Any, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(DataError, match=r"No space left on device; 2 of \d+ files are written"):
        fill(make_config(tmp_path), target)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2
    assert not list((tmp_path / "cache").glob(".chunk-*"))
    fill(make_config(tmp_path), target)
    assert contents(tmp_path) == contents(made)


def test_damaged_files_are_made_anew(made: Path, tmp_path: Path, target: Any) -> None:
    """A file that was cut or lost, and nothing else; remains of a kill go."""
    config = make_config(tmp_path)
    fill(config, target)
    cache = tmp_path / "cache"
    (cache / "chunk-00001.safetensors").write_bytes(b"short")
    (cache / "chunk-00002.json").unlink()
    (cache / ".chunk-00004.safetensors.x1").write_bytes(b"torn")
    kept = (cache / "chunk-00000.safetensors").stat().st_mtime_ns
    fill(config, target)
    assert (cache / "chunk-00000.safetensors").stat().st_mtime_ns == kept
    assert contents(tmp_path) == contents(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": "fp8"}, "storage was 'bfloat16', is now 'fp8'"),
        ({"taps": (2,)}, "streams was"),
        ({"batch_size": 5}, "batch_size was 4, is now 5"),
    ],
)
def test_another_cache_is_not_written_over(
    made: Path, target: Any, changes: dict[str, Any], message: str
) -> None:
    before = contents(made)
    with pytest.raises(DataError, match=f"holds features of something else: .*{message}"):
        fill(make_config(made), target, **changes)
    with pytest.raises(DataError, match="rows was 29, is now 12"):
        fill(make_config(made), target, make_data(toy.make_rows(7, seed=5)))
    assert contents(made) == before


def test_sizes() -> None:
    assert [size_of(n) for n in (0, 999, 1500, 2.5e9, 38e12)] == [
        "0 B", "999 B", "1.5 kB", "2.5 GB", "38.0 TB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing says which features"),
        ({"head": "eagle3", "chunk_mib": 0}, "Features.chunk_mib must be at least 1, got 0"),
        ({"taps": (1,), "batch_size": 0}, "Features.batch_size must be at least 1, got 0"),
    ],
)
def test_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FeaturesConfig(**given)
