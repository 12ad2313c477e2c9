"""Trackers beside the log: TensorBoard, and Weights & Biases where it is installed."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specjax.core import hosts
from specjax.core.errors import ConfigError
from specjax.training.config import TrainerConfig


class Trackers:
    """What a run reports to; use as a context manager. Records made again replace the old ones."""

    def __init__(self, config: TrainerConfig, out: Path) -> None:
        """Check that what is asked for is installed; nothing is written yet.

        Raises:
            ConfigError: Trainer.wandb is set and the package `wandb` is missing.
        """
        self._config, self._out = config, out
        self._board: Any = None
        self._run: Any = None
        self._wandb: Any = None
        if config.wandb:
            try:
                self._wandb = importlib.import_module("wandb")
            except ImportError:
                raise ConfigError(
                    "Trainer.wandb needs the package wandb: pip install wandb, or leave it empty"
                ) from None

    def begin(self, step: int) -> None:
        """Open the trackers for records after `step`, in the process that writes."""
        if not hosts.is_lead():
            return
        if self._config.tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(self._out / "tensorboard"), purge_step=step + 1)
        if self._wandb is not None:
            self._run = self._wandb.init(
                project=self._config.wandb,
                dir=str(self._out),
                name=self._out.name,
                # Of the whole path: folders of one name are other runs.
                id=hashlib.sha256(str(self._out.resolve()).encode()).hexdigest()[:12],
                resume="allow",
            )

    def __enter__(self) -> Self:
        """Enter the context."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what is still to be written and close."""
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)

    def record(self, record: Mapping[str, Any]) -> None:
        """Report a record of the log; vectors as one value per entry."""
        if self._board is None and self._run is None:
            return
        step, values = int(record["step"]), dict(_scalars(record))
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._run is not None:
            self._run.log(values, step=step)


def _scalars(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    out = []
    for name, value in record.items():
        if isinstance(value, list):
            out += [(f"{name}/{i}", part) for i, part in enumerate(value)]
        elif name != "step":
            out.append((name, value))
    return [(name, value) for name, value in out if isinstance(value, int | float)]
