"""Training on a cache is training on the target, within what the storage rounds."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax.core.errors import DataError, TrainingError
from specjax.data.dataset import Position
from specjax.data.packing import PackedBatches
from specjax.heads.base import borrow
from specjax.training.features.batches import from_cache
from specjax.training.features.store import FeatureStore, row_id
from specjax.training.logging import Display
from specjax.training.rows import TrainingData
from specjax.training.step import features
from specjax.training.trainer import Trainer
from tests.training import toy
from tests.training.features.cached import Loaded, bfloat16, fill, make_config, make_data
from tests.training.test_packed import PACKED, make_head

# Tests run each program once or twice: compile it quickly rather than well.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
Curve = list[tuple[int, float, float]]


def run(config: Any, target: Loaded, data: TrainingData, display: Any = None) -> Curve:
    """Train to the end; (step, loss, gradient norm) of the log."""
    head = toy.ToyHead()
    if config.features:
        data = from_cache(data, config, target[0].info, head)
        # No layer is left that could be run.
        target = target[0], target[1].replace(layers=())
    Trainer(config, *target, head, head.init(), data.train).run(display)
    lines = (Path(config.out) / "train.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], r["loss"], r["gradient_norm"]) for r in records]


@pytest.fixture(scope="module")
def loaded(target: Loaded) -> Loaded:
    return bfloat16(target)


@pytest.fixture(scope="module")
def online(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    config = make_config(tmp_path_factory.mktemp("online"), features="")
    return run(config, loaded, make_data())


@pytest.fixture(scope="module")
def folder(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    fill(make_config(folder), loaded)
    return folder


class Crash(Display):
    """Ends the process, as far as a test can."""

    def step(self, step: int) -> None:
        if step == 5:
            raise RuntimeError("crash")


def test_cached_training_is_online_training(folder: Path, loaded: Loaded, online: Curve) -> None:
    """The same data order and losses; interrupted and resumed they stay the same, bit for bit."""
    unbroken = run(make_config(folder, out=str(folder / "unbroken")), loaded, make_data())
    assert [row[0] for row in unbroken] == list(range(1, 9))
    np.testing.assert_allclose(unbroken, online, rtol=1e-6)
    config = make_config(folder)
    with pytest.raises(RuntimeError, match="crash"):
        run(config, loaded, make_data(), Crash(8))
    assert run(config, loaded, make_data()) == unbroken
    with pytest.raises(TrainingError, match=r"features was '.*', is now None"):
        run(dataclasses.replace(config, features=""), loaded, make_data())


def test_fp8_stays_close(tmp_path: Path, loaded: Loaded, online: Curve) -> None:
    config = make_config(tmp_path)
    fill(config, loaded, storage="fp8")
    found = run(config, loaded, make_data())
    losses, want = (np.asarray([row[1] for row in rows]) for rows in (found, online))
    np.testing.assert_allclose(losses, want, rtol=0.01)
    assert np.abs(losses - want).max() > 1e-4  # it is another storage after all


@pytest.mark.parametrize("kind", PACKED)
def test_every_head_sees_what_the_target_gives(kind: str, loaded: Loaded, tmp_path: Path) -> None:
    """Texts that share rows are cached one by one; what stands at pads plays no part."""
    model, weights = loaded
    head, params = make_head(kind, model, borrow(model, weights))
    batches = PackedBatches(toy.make_rows(6, seed=4), 4, 28)
    assert max(map(len, batches.members(Position()))) > 1
    data = TrainingData(batches, None, "")
    config = make_config(tmp_path)
    fill(config, loaded, data, (head.taps, head.reads))
    cached = from_cache(data, config, model.info, head).train

    plain, key = batches.batch(Position()), jax.random.key(0)
    want = jit(lambda weights, batch: features(model, weights, head, batch, key))(weights, plain)
    no_layers = weights.replace(layers=())
    got = features(model, no_layers, head, cached.batch(Position()), key)
    loss = jit(lambda batch: head.loss(params, borrow(model, weights), batch)[0])
    np.testing.assert_allclose(loss(got), loss(want), rtol=5e-3)
    got, want = jax.device_get((got.replace(key=None), want.replace(key=None)))
    assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, want)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    real = np.arange(28) < plain["lengths"][:, None]
    # A text is rounded as it was alone, which other shapes of a product may do otherwise.
    close = partial(np.testing.assert_allclose, rtol=2e-2, atol=2e-2)
    close(np.float32(got.hidden[real]), np.float32(want.hidden[real]))
    close(np.float32(got.taps[:, real]), np.float32(want.taps[:, real]))
    for mine, its in zip(jax.tree.leaves(got.keys), jax.tree.leaves(want.keys), strict=True):
        close(*(np.float32(x.swapaxes(1, 2)[real]) for x in (mine, its)))


def test_batches_come_in_the_same_order(folder: Path, loaded: Loaded) -> None:
    data = make_data()
    both = from_cache(data, make_config(folder), loaded[0].info, toy.ToyHead())
    cached = both.train
    assert both.heldout is not None and len(list(both.heldout.iterate(epochs=1))) == 3
    assert cached.steps_per_epoch == data.train.steps_per_epoch
    assert cached.padding == data.train.padding
    start = Position(0, 2)
    pairs = zip(cached.iterate(start, 2), data.train.iterate(start, 2), strict=True)
    for (batch, after), (want, want_after) in pairs:
        assert after == want_after
        for name, value in want.items():
            np.testing.assert_array_equal(batch[name], value)
        real = np.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]
        assert not batch["features"].states[~real].any()
        assert batch["features"].states[real].any(-1).all()
    assert cached.members(start) == data.train.members(start)
    assert cached.shape(start) == data.train.shape(start)


def test_f16_a_run_stops_at_features_that_were_changed(loaded: Loaded, tmp_path: Path) -> None:
    """F16: never trained on silently, though another thread reads them."""
    config = make_config(tmp_path)
    fill(config, loaded)
    for chunk in (tmp_path / "cache").glob("*.safetensors"):
        content = bytearray(chunk.read_bytes())
        content[-1] ^= 1
        chunk.write_bytes(content)
    cached = from_cache(make_data(), config, loaded[0].info, toy.ToyHead())
    with pytest.raises(DataError, match="are not those that were written"):
        list(cached.train.iterate(epochs=1))


def test_other_rows_and_heads_are_refused(folder: Path, loaded: Loaded) -> None:
    config, info = make_config(folder), loaded[0].info
    more = make_data(toy.make_rows(30, seed=3))
    with pytest.raises(DataError, match=r"lacks 30 of 35 rows"):
        from_cache(more, config, info, toy.ToyHead())
    with pytest.raises(DataError, match=r"has no tap 4 of the target"):
        from_cache(make_data(), config, info, toy.ToyHead(taps=(1, 4)))
    with pytest.raises(DataError, match="target_dtype was 'bfloat16', is now 'float32'"):
        changed = dataclasses.replace(config, target_dtype="float32")
        from_cache(make_data(), changed, info, toy.ToyHead())


def test_a_process_reads_the_features_of_its_rows_alone(
    folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = from_cache(make_data(), make_config(folder), loaded[0].info, toy.ToyHead())
    whole = data.train.batch(Position())
    read: list[str] = []
    fetch = FeatureStore.read

    def note(store: FeatureStore, id_: str) -> Any:
        read.append(id_)
        return fetch(store, id_)

    monkeypatch.setattr(FeatureStore, "read", note)
    part = data.train.batch(Position(), {1})
    ((member,),) = (row for b, row in enumerate(data.train.members(Position())) if b == 1)
    assert read == [row_id(data.train.rows[member].ids)]
    np.testing.assert_array_equal(part["features"].states[1], whole["features"].states[1])
    assert not part["features"].states[[0, 2, 3]].any() and not part["lengths"][[0, 2, 3]].any()
