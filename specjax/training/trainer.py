"""The training loop: any head, one compiled step, nothing lost when it is interrupted.

The loop knows no algorithm: it hands each batch with the target's states to `head.loss`. Run
again with the same configuration, it goes on where the newest checkpoint stands, and its losses
are those of an unbroken run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.core import hosts
from specjax.core.errors import ConfigError, TrainingError
from specjax.data.dataset import Batches, Position
from specjax.io.hf import write_json
from specjax.targets.base import Target
from specjax.training import fingerprint, optim
from specjax.training.checkpoint import Checkpoints, Record
from specjax.training.config import TrainerConfig
from specjax.training.decoding import MEASURED, Probe
from specjax.training.logging import Display, JsonLines
from specjax.training.partition import Partition
from specjax.training.placement import Placement
from specjax.training.step import Fixed, Steps, new_state, nothing_gathered
from specjax.training.trackers import Trackers

PyTree = Any
_TOKENS = ("input_ids", "loss_mask", "lengths", "documents", "positions")
_OF_STEP = ("gradient_norm", "skipped")  # metrics of a step, not of a batch


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run knows of itself.

    Attributes:
        params: the head's whole tree, trained leaves in float32.
        steps: optimiser steps taken.
        record: the last record of the log.
        best: where decoding was measured, the step whose weights these are, and what was measured.
    """

    params: PyTree
    steps: int
    record: Mapping[str, Any]
    best: Best | None = None


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint so far.

    Attributes:
        step: optimiser steps taken by then.
        mean_acceptance_length: decoded with its weights.
    """

    step: int
    mean_acceptance_length: float


class Trainer:
    """One run: its state, its data and the folder it writes to."""

    def __init__(
        self,
        config: TrainerConfig,
        target: Target,
        target_params: PyTree,
        head: Any,
        head_params: PyTree,
        batches: Batches,
        heldout: Batches | None = None,
    ) -> None:
        """Prepare a run; nothing is computed or written yet.

        Args:
            config: the run.
            target: the frozen target.
            target_params: its weights, in the dtype that features shall have and where they shall
                live (`Placement.target`).
            head: the head; it needs `taps` and `loss`, and may say what is `trainable()`.
            head_params: its weights before training.
            batches: what to train on.
            heldout: what to measure on, in order.

        Raises:
            ConfigError: a mesh that does not fit, or noise on states that the head does not tap.
            DataError: decoding is asked for, and no held-out row has a prompt.
        """
        if config.feature_noise and not head.taps:
            raise ConfigError(
                f"Trainer.feature_noise acts on tapped states, and this {head.name} head taps none:"
                " set it to 0"
            )
        self.config, self.head = config, head
        self.batches, self.heldout = batches, heldout
        self.out = Path(config.out).expanduser()
        self.partition = Partition.of(head_params, _trainable(head))
        trained, frozen = self.partition.split(head_params)
        self.placement = Placement.of(config.mesh, config.batch_size)
        leaves, still = self.placement.leaves(head, self.partition)
        self.fixed = Fixed(frozen=hosts.put(frozen, still), target=target_params)
        if config.mesh.devices > 1:
            target = dataclasses.replace(target, layout=self.placement.served)
        micro = config.epochs * batches.steps_per_epoch
        self.total = config.steps or math.ceil(micro / config.accumulation)
        rule = optim.optimizer(config.optim, self.total)
        self.rate = optim.schedule(config.optim, self.total)
        fresh = new_state(trained, rule, averaged=config.ema > 0)
        self.state, places = self.placement.state(fresh, rule, leaves)
        self.position = Position()
        self.share = self.placement.share(config.batch_size)
        self.steps = Steps(
            target,
            head,
            self.partition,
            rule,
            compute_dtype=config.compute_dtype,
            seed=config.seed,
            noise=config.feature_noise,
            ema=config.ema,
            places=places,
        )
        self.probe = Probe.of(config, target, head, heldout.rows if heldout else ())
        self.trackers = Trackers(config, self.out)
        self.best: Best | None = None
        self.log = JsonLines(self.out / "train.jsonl")
        self._skipped_in_a_row = 0
        self._last: Mapping[str, Any] = {}

    def run(self, display: Display | None = None) -> Outcome:
        """Train to the end, from the newest checkpoint if there is one.

        SIGTERM and SIGINT save and end the process; the same run then goes on from there.

        Raises:
            TrainingError: a checkpoint of another run, or too many non-finite steps in a row.
            KeyboardInterrupt: on SIGINT, after saving.
            SystemExit: on SIGTERM, after saving.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        display = display or Display(self.total)
        record = self._record()
        with (
            Checkpoints(self.out / "checkpoints", self.config.keep) as checkpoints,
            _signals() as caught,
            self.trackers,
            display,
        ):
            self._resume(checkpoints, record, display)
            done = saved = int(self.state.step)
            self.trackers.begin(done)
            stream = self.batches.iterate(self.position, share=self.share)
            while done < self.total:
                found = self._step(stream, display)
                done += 1
                better = self._is_best(found)
                # Signals reach the processes of a run between different steps.
                leave = hosts.largest(caught[0] if caught else 0)
                if better or leave or done == self.total or done % self.config.save_every == 0:
                    record["position"] = dataclasses.asdict(self.position)
                    if self.best is not None:
                        record["best"] = dataclasses.asdict(self.best)
                        checkpoints.best = self.best.step
                    checkpoints.save(self.state, record)
                    saved = done
                if leave:
                    checkpoints.wait()
                    display.say(f"saved at step {saved}; the same command resumes there")
                    _leave(leave)
            checkpoints.wait()
            result = self.state.result
            if self.best is not None and self.best.step < done:
                result = checkpoints.read(self.best.step, self.state).result
        params = self.partition.join(result, self.fixed.frozen)
        return Outcome(params, done, self._last, self.best)

    def evaluate(self) -> dict[str, Any]:
        """Return the held-out rows' metrics, means over supervised tokens."""
        if self.heldout is None:
            return {}
        found = [
            self.steps.evaluate(self.state, self.fixed, self.placement.batch(batch))
            for batch, _ in self.heldout.iterate(epochs=1, share=self.share)
        ]
        return {f"heldout_{name}": value for name, value in _mean(jax.device_get(found)).items()}

    def decode(self) -> dict[str, Any]:
        """Return what decoding with the weights as they are now measures; {} without a probe."""
        if self.probe is None:
            return {}
        params = self.partition.join(self.state.result, self.fixed.frozen)
        return self.probe.measure(self.fixed.target, params)

    def _is_best(self, record: Mapping[str, Any]) -> bool:
        """Note a checkpoint that decodes better than all before it."""
        length = record.get(MEASURED)
        if length is None or (self.best and length <= self.best.mean_acceptance_length):
            return False
        self.best = Best(record["step"], length)
        return True

    def _due(self, step: int, every: int) -> bool:
        return step == self.total or (every > 0 and step % every == 0)

    def _record(self) -> Record:
        config = self.config
        print_ = fingerprint.of_run(config, self.head, self.fixed.frozen)
        fingerprint.refuse_strangers(print_)
        return {
            "fingerprint": print_,
            "settings": {**dataclasses.asdict(config.optim), "steps": self.total},
        }

    def _resume(self, checkpoints: Checkpoints, record: Record, display: Display) -> None:
        found = checkpoints.restore(self.state, record["fingerprint"])
        if found is None:
            self.log.cut(-1)
            display.say(f"training for {self.total} steps")
            return
        self.state, saved = found
        self.position = Position(**saved["position"])
        if "best" in saved:
            self.best = Best(**saved["best"])
            record["best"], checkpoints.best = saved["best"], self.best.step
        step = int(self.state.step)
        self.log.cut(step)
        self._last = self.log.last()
        display.begin(step)
        display.say(f"resumed at step {step} of {self.total}")
        for name, now in record["settings"].items():
            was = saved["settings"].get(name)
            if (list(now) if isinstance(now, tuple) else now) != was:
                display.say(f"changed since the checkpoint: {name} was {was}, is {now}")

    def _step(
        self, stream: Iterator[tuple[dict[str, np.ndarray], Position]], display: Display
    ) -> Mapping[str, Any]:
        """Take one optimiser step and log it; returns the record."""
        began = time.perf_counter()
        config = self.config
        gathered = nothing_gathered(self.state.trained) if config.accumulation > 1 else None
        parts: list[dict[str, Any]] = []
        tokens, at = 0, self.position
        rate = float(self.rate(int(self.state.step) - int(self.state.skipped)))
        skipped = int(self.state.skipped)
        for part in range(config.accumulation):
            at = self.position
            batch, self.position = next(stream)
            tokens += self.batches.tokens(at)
            self.state, gathered, metrics = self.steps.train(
                self.state,
                gathered,
                self.fixed,
                self.placement.batch(batch),
                np.int32(part),
                last=part + 1 == config.accumulation,
            )
            parts.append(metrics)
        step = int(self.state.step)
        record = {"step": step, "epoch": self.position.epoch, **_mean(jax.device_get(parts))}
        seconds = time.perf_counter() - began
        record |= {"rate": rate, "tokens": tokens, "tokens_per_second": tokens / seconds}
        if self._due(step, config.eval_every):
            record |= self.evaluate()
        if self._due(step, config.decode_every):
            record |= self.decode()
        self._last = {name: _plain(value) for name, value in record.items()}
        self.log.write(self._last)
        display.step(step)
        self.trackers.record(self._last)
        self._guard(int(self.state.skipped) > skipped, step, at, display)
        if step % config.log_every == 0 or step == self.total:
            display.record(record, (self.total - step) * seconds)
        return self._last

    def _guard(self, skipped: bool, step: int, at: Position, display: Display) -> None:
        """Report a skipped step; stop after several in a row."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            return
        display.say(f"step {step} skipped: loss or gradients are not finite")
        if self._skipped_in_a_row < self.config.max_skipped:
            return
        path = self.out / "non_finite.json"
        if hosts.is_lead():
            batch = self.batches.batch(at)
            tokens = {name: batch[name].tolist() for name in _TOKENS if name in batch}
            place = {"position": dataclasses.asdict(at), "rows": self.batches.members(at)}
            write_json({"step": step, **place, **tokens}, path)
        raise TrainingError(
            f"stopped at step {step}: {self._skipped_in_a_row} steps in a row were not finite; "
            f"the last batch is in {path}"
        )


def _mean(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the batches of a step, weighted by supervised tokens, which are summed."""
    weights = np.asarray([float(part["supervised"]) for part in parts])
    # A step of one batch keeps its values untouched; an unsupervised one has no weights.
    several = len(parts) > 1 and weights.sum() > 0
    shares = weights / weights.sum() if several else np.full(len(parts), 1 / len(parts))
    out: dict[str, Any] = {"loss": None}  # first in the record
    for name, newest in parts[-1].items():
        if name in _OF_STEP:
            out[name] = newest
        elif name == "supervised":
            out[name] = weights.sum()
        else:
            out[name] = sum(s * np.float64(p[name]) for s, p in zip(shares, parts, strict=True))
    return out


def _plain(value: Any) -> Any:
    """The value as JSON has it; what is not finite becomes null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _trainable(head: Any) -> PyTree | None:
    return head.trainable() if hasattr(head, "trainable") else None


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of dying; a second one acts as ever."""
    caught: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        del frame
        caught.append(number)
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():  # only it may set handlers
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
