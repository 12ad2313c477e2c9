import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from specjax.core.errors import ConfigError
from specjax.targets.base import Target
from specjax.training.trackers import Trackers
from specjax.training.trainer import Trainer
from tests.training import toy

Loaded = tuple[Target, Any]


def events(folder: Path) -> list[tuple[int, str, float]]:
    """Read event files by their format: length, checksum, a protobuf message, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    out = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            out += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            data = data[16 + size :]
    return out


def test_tensorboard_holds_the_log(tmp_path: Path, target: Loaded) -> None:
    head = toy.ToyHead()
    config = toy.make_config(tmp_path, steps=3, tensorboard=True)
    run = Trainer(config, *target, head, head.init(), toy.make_batches())
    outcome = run.run()
    found = events(Path(config.out) / "tensorboard")
    assert {step for step, *_ in found} == {1, 2, 3}
    last = {tag: value for step, tag, value in found if step == 3}
    assert last["loss"] == pytest.approx(outcome.record["loss"], rel=1e-6)
    assert last["pair/1"] == pytest.approx(outcome.record["pair"][1], rel=1e-6)
    assert "step" not in last


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package records what it is told."""
    said: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            said.append((step, values))

        def finish(self, exit_code: int) -> None:
            said.append(exit_code)

    fake = types.ModuleType("wandb")
    fake.init = lambda **given: said.append(given["project"]) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = toy.make_config(tmp_path, wandb="drafts")
    with Trackers(config, tmp_path) as trackers:
        trackers.begin(0)
        trackers.record({"step": 1, "loss": 2.0, "pair": [1.0, None], "epoch": 0})
    assert said == ["drafts", (1, {"loss": 2.0, "pair/0": 1.0, "epoch": 0}), 0]


def test_a_missing_tracker_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"Trainer\.wandb needs the package wandb"):
        Trackers(toy.make_config(tmp_path, wandb="drafts"), tmp_path)
