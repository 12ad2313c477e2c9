"""Checkpoints of a training run: written whole or not at all, refused where they do not belong.

Orbax writes each into a temporary folder and renames it, so a kill at any moment leaves the last
good one. Beside the arrays lies a JSON record: where the data stands, and the fingerprint of
everything that must not change between save and resume.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging

from specjax.core import hosts
from specjax.core.errors import TrainingError
from specjax.training.fingerprint import unequal
from specjax.training.step import TrainState

Record = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in one folder.

    `close` waits for a save in progress; use as a context manager.

    Attributes:
        folder: where they lie.
        best: step of one that is kept however old it is, None for no such.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        """Open or make the folder; remains of interrupted saves are removed.

        Args:
            folder: where they lie, one subfolder per step.
            keep: how many of the newest to keep.
        """
        self.folder = folder.resolve()
        self._keep = keep
        self.best: int | None = None
        # Orbax reports progress and folder layouts as warnings, which says nothing to a user.
        absl_logging.set_verbosity(absl_logging.ERROR)
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        return ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Checkpoints:
        """Enter the context."""
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for a save in progress and close."""
        self._manager.close()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Say which of the checkpoints stay; orbax asks (`PreservationPolicy`)."""
        del context
        newest = len(checkpoints) - self._keep
        return [i >= newest or saved.step == self.best for i, saved in enumerate(checkpoints)]

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, record: Record) -> None:
        """Start writing a checkpoint; the caller may go on and donate `state`.

        Args:
            state: everything a step changes.
            record: JSON values: "position" in the data, "fingerprint", "settings".
        """
        step = int(state.step)
        # A copy, since the next step writes into the donated buffers while orbax still reads.
        kept = jax.tree.map(_copy, state)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(kept), record=ocp.args.JsonSave(record)
            ),
        )

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete."""
        self._manager.wait_until_finished()

    def restore(
        self, like: TrainState, fingerprint: Mapping[str, Any]
    ) -> tuple[TrainState, Record] | None:
        """Read the newest checkpoint that is whole.

        Damaged ones are set aside as `damaged-<step>`, with a warning.

        Args:
            like: a state of the same structure and shapes.
            fingerprint: of this run.

        Returns:
            (state, record), or None where there is no checkpoint.

        Raises:
            TrainingError: it belongs to another run; names what differs and both values. Of several
                processes, one cannot read it.
        """
        for step in reversed(self.steps):
            with self._reading(step):
                record = self._read(step, record=ocp.args.JsonRestore()).record
                check_fingerprint(record["fingerprint"], fingerprint, self.folder / str(step))
                abstract = jax.tree.map(_abstract, like)
                state = self._read(step, state=ocp.args.StandardRestore(abstract)).state
                return state, record
        return None

    def read(self, step: int, like: TrainState) -> TrainState:
        """Read one of the checkpoints.

        Args:
            step: which.
            like: a state of the same structure and shapes.

        Raises:
            TrainingError: it is gone or damaged.
        """
        try:
            abstract = jax.tree.map(_abstract, like)
            return self._read(step, state=ocp.args.StandardRestore(abstract)).state
        except Exception as error:  # of many kinds, as below
            raise TrainingError(
                f"the best checkpoint {self.folder / str(step)} cannot be read"
                f" ({type(error).__name__}); the newest are at steps {self.steps}"
            ) from error

    def _read(self, step: int, **items: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Set the checkpoint aside if it cannot be read; where processes share it, refuse it."""
        try:
            yield
        except TrainingError:
            raise
        except Exception as error:  # orbax raises many kinds; all mean a damaged checkpoint
            reason = (str(error).splitlines() or [""])[0][:100]
            if hosts.are_several():  # of which others may have read it
                raise TrainingError(
                    f"checkpoint {self.folder / str(step)} cannot be read"
                    f" ({type(error).__name__}: {reason}); move it away to go on from the one"
                    " before"
                ) from error
            aside = self.folder / f"damaged-{step}"
            warnings.warn(
                f"checkpoint {self.folder / str(step)} cannot be read and is set aside as "
                f"{aside.name} ({type(error).__name__}: {reason})",
                stacklevel=4,
            )
            self._manager.close()
            os.rename(self.folder / str(step), aside)
            self._manager = self._open()


def check_fingerprint(saved: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        TrainingError: names every entry that differs with both values.
    """
    changed = [f"{name} was {was!r}, is now {is_!r}" for name, was, is_ in unequal(saved, now)]
    if changed:
        raise TrainingError(
            f"{where} belongs to another run: {'; '.join(changed)}; "
            "set Trainer.out to a new folder, or undo the change"
        )


def _copy(leaf: jax.Array) -> Any:
    """A copy on the host where one process holds all of a leaf, else of each process's part."""
    return np.array(jax.device_get(leaf)) if leaf.is_fully_addressable else jnp.copy(leaf)


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
