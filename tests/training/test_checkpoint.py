import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import TrainingError
from specjax.training import fingerprint, optim
from specjax.training.checkpoint import Checkpoints
from specjax.training.config import OptimConfig
from specjax.training.partition import Partition
from specjax.training.step import TrainState, new_state
from tests.training.toy import ToyHead, make_config

PRINT = {"head.mask_id": 90, "taps": [1, 3]}


def make_state(steps: int) -> TrainState:
    """A state after `steps` real AdamW updates."""
    head = ToyHead()
    params = head.init()
    trained, _ = Partition.of(params, head.trainable()).split(params)
    rule = optim.optimizer(OptimConfig(), 10)
    state = new_state(trained, rule)
    for i in range(steps):
        grads = jax.tree.map(lambda leaf, i=i: jnp.sin(leaf * (i + 1)), state.trained)
        _, moments = rule.update(grads, state.optimizer, state.trained)
        state = state.replace(step=state.step + 1, optimizer=moments)
    return state


def record(step: int, print_: dict[str, Any] = PRINT) -> dict[str, Any]:
    return {"position": {"epoch": 1, "step": step}, "fingerprint": print_, "settings": {}}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def state() -> TrainState:
    return make_state(3)


def test_comes_back_bit_for_bit(tmp_path: Path, state: TrainState) -> None:
    """F38: weights, both moments, counts and step, where the data stands, and the step's key."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(state, record(7))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        found = checkpoints.restore(make_state(0), PRINT)
    assert found is not None
    restored, saved = found
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert len({len(b) for b in bits(restored)}) > 1 and int(restored.step) == 3
    assert saved["position"] == {"epoch": 1, "step": 7}
    keys = [jax.random.fold_in(jax.random.key(0), s.step) for s in (state, restored)]
    assert bits(jax.random.key_data(keys[0])) == bits(jax.random.key_data(keys[1]))


def test_saving_does_not_read_donated_buffers(tmp_path: Path) -> None:
    state = make_state(1)
    wanted = bits(state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state, record(0))
        jax.block_until_ready(overwrite(state))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        found = checkpoints.restore(make_state(0), PRINT)
    assert found is not None and bits(found[0]) == wanted


def test_keeps_the_newest(tmp_path: Path, state: TrainState) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (3, 5, 8):
            checkpoints.save(state.replace(step=jnp.int32(step)), record(step))
        checkpoints.wait()
        assert checkpoints.steps == [5, 8]


def test_nothing_to_restore(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(make_state(0), PRINT) is None


def test_refuses_another_run(tmp_path: Path, state: TrainState) -> None:
    """F35: a mask id that changed between save and resume; both values are named."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(state, record(0))
        checkpoints.wait()
        with pytest.raises(TrainingError, match=r"head.mask_id was 90, is now 91") as caught:
            checkpoints.restore(state, {**PRINT, "head.mask_id": 91})
        assert "taps" not in str(caught.value) and "\n" not in str(caught.value)
        assert checkpoints.steps == [3]  # it is not damaged, and stays


@pytest.mark.parametrize("damage", ["delete", "truncate", "record"])
def test_damaged_newest_gives_way_to_the_one_before(
    tmp_path: Path, state: TrainState, damage: str
) -> None:
    """F37: one file of the newest checkpoint is gone or cut."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state.replace(step=jnp.int32(step)), record(step))
    if damage == "record":
        (tmp_path / "2" / "record" / "metadata").unlink()
    else:
        data = [
            f for f in (tmp_path / "2" / "state").rglob("*") if f.is_file() and f.parent.name == "d"
        ]
        for file in data:
            if damage == "delete":
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.warns(UserWarning, match="checkpoint .*2 cannot be read and is set aside"):
            found = checkpoints.restore(state, PRINT)
        assert found is not None and int(found[0].step) == 1 and found[1]["position"]["step"] == 1
        assert (tmp_path / "damaged-2").is_dir() and checkpoints.steps == [1]
        checkpoints.save(state.replace(step=jnp.int32(2)), record(2))  # its name is free again
    with Checkpoints(tmp_path, keep=3) as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checkpoints.restore(state, PRINT)
        assert found is not None and int(found[0].step) == 2


def test_remains_of_a_killed_save_are_not_picked(tmp_path: Path, state: TrainState) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(state, record(0))
    whole = {p.relative_to(tmp_path / "3"): p for p in (tmp_path / "3").rglob("*") if p.is_file()}
    torn = tmp_path / "9.orbax-checkpoint-tmp-1"
    for name, path in list(whole.items())[: len(whole) // 2]:
        (torn / name).parent.mkdir(parents=True, exist_ok=True)
        (torn / name).write_bytes(path.read_bytes())
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps == [3]


def test_fingerprint_covers_what_matters(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    frozen = {"map": jnp.arange(4)}
    base = fingerprint.of_run(config, ToyHead(), frozen)
    assert base == fingerprint.of_run(config, ToyHead(), frozen)

    def changed(config: Any = config, head: Any = None, frozen: Any = frozen) -> set[str]:
        now = fingerprint.of_run(config, head or ToyHead(), frozen)
        return {name for name in now if now[name] != base[name]}

    assert changed(head=ToyHead(mask_id=91)) == {"head.mask_id"}
    assert changed(head=ToyHead(taps=(1, 2))) == {"head.taps"}
    assert changed(frozen={"map": jnp.arange(4)[::-1]}) == {"frozen map"}
    assert changed(make_config(tmp_path, seed=5)) == {"seed"}
    assert changed(make_config(tmp_path, batch_size=2)) == {"batch_size"}
    (tmp_path / "data.jsonl").write_text('{"a": 1}\n')
    assert changed() == {"data"}
    (tmp_path / "target" / "model.safetensors").write_bytes(b"x" * 9)
    assert changed() == {"data", "target"}
