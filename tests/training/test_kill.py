"""kill -9 at random instants: the run that goes on is the unbroken one, bit for bit (F36, F37)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax.targets.base import Target
from specjax.training.config import TrainerConfig
from specjax.training.trainer import Trainer
from tests.training import toy

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import sys, time
from pathlib import Path
from specjax.training.logging import Display
from specjax.training.trainer import Trainer
from tests.training import toy

class Slow(Display):
    def step(self, step):
        time.sleep(0.03)

head = toy.ToyHead()
config = toy.make_config(Path(sys.argv[1]), steps=int(sys.argv[2]), save_every=int(sys.argv[3]))
run = Trainer(config, *toy.make_target(), head, head.init(), toy.make_batches())
run.run(Slow(config.steps))
"""


def in_a_step(out: Path, rng: random.Random) -> Callable[[], bool]:
    """Wait until steps are taken, then up to a second: step, save or the time between."""
    log = out / "train.jsonl"
    before = log.stat().st_size if log.exists() else 0
    until: list[float] = []

    def now() -> bool:
        if not until and log.exists() and log.stat().st_size > before:
            until.append(time.monotonic() + rng.uniform(0.0, 1.0))
        return bool(until) and time.monotonic() >= until[0]

    return now


def in_a_save(out: Path, rng: random.Random) -> Callable[[], bool]:
    """Wait for the folder of a save in progress, then for a moment within its few milliseconds."""
    until: list[float] = []

    def now() -> bool:
        if not until and any((out / "checkpoints").glob("*tmp*")):
            until.append(time.monotonic() + rng.uniform(0.0, 0.05))
        return bool(until) and time.monotonic() >= until[0]

    return now


def read(config: TrainerConfig) -> list[tuple[int, float, float]]:
    rows = [json.loads(x) for x in (Path(config.out) / "train.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["gradient_norm"]) for row in rows]


def kill_and_resume(
    folder: Path, target: tuple[Target, Any], kills: int, steps: int, every: int, when: Any
) -> None:
    def finish(name: str) -> tuple[TrainerConfig, Any]:
        config = toy.make_config(folder / name, steps=steps, save_every=every)
        head = toy.ToyHead()
        run = Trainer(config, *target, head, head.init(), toy.make_batches())
        return config, jax.device_get(run.run().params)

    unbroken, wanted = finish("unbroken")
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    command = [sys.executable, "-c", CHILD, str(folder / "killed"), str(steps), str(every)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    killed = 0
    for _ in range(kills):
        child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        now = when(folder / "killed" / "run", rng)
        while child.poll() is None and not now():
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        _, shown = child.communicate()
        assert child.returncode in (-signal.SIGKILL, 0), shown.decode()[-2000:]
        killed += child.returncode == -signal.SIGKILL
    assert killed >= kills // 2  # the others had come to their end before
    config, found = finish("killed")
    assert len(read(config)) == steps and read(config) == read(unbroken)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_kill_and_resume_is_exact(tmp_path: Path, target: tuple[Target, Any]) -> None:
    kill_and_resume(tmp_path, target, kills=2, steps=40, every=2, when=in_a_step)


@pytest.mark.slow
@pytest.mark.parametrize(("when", "every"), [(in_a_step, 5), (in_a_save, 1)])
def test_ten_kills(tmp_path: Path, target: tuple[Target, Any], when: Any, every: int) -> None:
    kill_and_resume(tmp_path, target, kills=12, steps=300, every=every, when=when)
