import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax.core.errors import TrainingError
from specjax.data.chat import Encoded
from specjax.targets.base import Target
from specjax.training.config import TrainerConfig
from specjax.training.logging import Display
from specjax.training.trainer import Trainer
from tests.training import toy

Loaded = tuple[Target, Any]


def trainer(config: TrainerConfig, target: Loaded, head: Any = None, **given: Any) -> Trainer:
    head = head or toy.ToyHead()
    given.setdefault("batches", toy.make_batches())
    return Trainer(config, *target, head, head.init(), **given)


def losses(config: TrainerConfig) -> list[tuple[int, float, float]]:
    lines = (Path(config.out) / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["step"], row["loss"], row["gradient_norm"]) for row in rows]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, target: Loaded) -> tuple[Any, list]:
    """(weights, loss curve) of an unbroken run."""
    config = toy.make_config(tmp_path_factory.mktemp("unbroken"))
    outcome = trainer(config, target).run()
    assert outcome.steps == 8 and [row[0] for row in losses(config)] == list(range(1, 9))
    return jax.device_get(outcome.params), losses(config)


class Interrupting(Display):
    """Raises or signals at a step, as a crash or an operator would."""

    def __init__(self, at: int, action: Any) -> None:
        super().__init__(8)
        self._at, self._action = at, action

    def step(self, step: int) -> None:
        if step == self._at:
            self._action()


def crash() -> None:
    raise RuntimeError("crash")


def test_resume_after_a_crash_is_exact(
    tmp_path: Path, target: Loaded, reference: tuple[Any, list]
) -> None:
    """Steps 5 to 8 are repeated from the checkpoint at 4, in the second epoch (F36)."""
    config = toy.make_config(tmp_path)
    with pytest.raises(RuntimeError, match="crash"):
        trainer(config, target).run(Interrupting(5, crash))
    assert [row[0] for row in losses(config)] == [1, 2, 3, 4, 5]
    again = trainer(config, target)
    outcome = again.run()
    assert losses(config) == reference[1]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(outcome.params), reference[0])
    # Once more: it is done, so nothing is computed and the same weights come back.
    outcome = trainer(config, target).run()
    assert losses(config) == reference[1] and outcome.record["step"] == 8
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(outcome.params), reference[0])


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_signals_save_and_leave(
    tmp_path: Path, target: Loaded, reference: tuple[Any, list], number: int, raised: type
) -> None:
    config = toy.make_config(tmp_path, save_every=100)
    before = signal.getsignal(number)
    with pytest.raises(raised):
        trainer(config, target).run(Interrupting(3, lambda: os.kill(os.getpid(), number)))
    assert signal.getsignal(number) is before
    assert [p.name for p in (Path(config.out) / "checkpoints").iterdir() if p.is_dir()] == ["3"]
    trainer(config, target).run()
    assert losses(config) == reference[1]


def test_accumulation_steps_and_epochs(tmp_path: Path, target: Loaded) -> None:
    batches = toy.make_batches(toy.make_rows(18), batch_size=3)
    config = toy.make_config(tmp_path, steps=None, epochs=2, accumulation=3, save_every=2)
    run = trainer(config, target, batches=batches)
    micro = 2 * batches.steps_per_epoch
    assert run.total == -(-micro // 3)
    assert run.run().steps == run.total
    saved = sorted(int(p.name) for p in (Path(config.out) / "checkpoints").iterdir())
    assert all(step % 2 == 0 or step == run.total for step in saved)  # F27: optimiser steps


def test_heldout_loss_is_the_mean_over_tokens(tmp_path: Path, target: Loaded) -> None:
    heldout = toy.make_batches(toy.make_rows(5, seed=9), batch_size=2)
    config = toy.make_config(tmp_path, steps=2)
    run = trainer(config, target, heldout=heldout)
    found = run.run().record
    parts = [
        jax.device_get(run.steps.evaluate(run.state, run.fixed, batch))
        for batch, _ in heldout.iterate(epochs=1)
    ]
    wanted = sum(p["loss"] * p["supervised"] for p in parts) / sum(p["supervised"] for p in parts)
    np.testing.assert_allclose(found["heldout_loss"], wanted, rtol=1e-6)
    np.testing.assert_allclose(found["heldout_pair"], [wanted, 2 * wanted], rtol=1e-6)


def test_stops_after_several_non_finite_steps(tmp_path: Path, target: Loaded) -> None:
    rows = [Encoded(np.full(6, 95, np.int32), np.arange(6) > 2) for _ in range(8)]
    config = toy.make_config(tmp_path, max_skipped=3)
    with pytest.raises(TrainingError, match="stopped at step 3: 3 steps in a row"):
        run = trainer(config, target, toy.ToyHead(poison=95), batches=toy.make_batches(rows))
        run.run()
    saved = json.loads((Path(config.out) / "non_finite.json").read_text())
    assert saved["input_ids"][0][:6] == [95] * 6 and saved["step"] == 3
    log = (Path(config.out) / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in log] == [None] * 3  # valid JSON, no NaN


def test_refuses_to_resume_another_run(tmp_path: Path, target: Loaded) -> None:
    config = toy.make_config(tmp_path, steps=2)
    trainer(config, target).run()
    with pytest.raises(TrainingError, match=r"head.mask_id was 90, is now 91"):
        trainer(config, target, toy.ToyHead(mask_id=91)).run()
