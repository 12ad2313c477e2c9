"""Draft heads: one file each, behind one interface (`heads.base`).

This module imports no head before one is asked for, so that configurations stay light.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load(
    path: str | Path, info: Any, dtype: str = "float32", shardings: Any | None = None
) -> tuple[Any, Any]:
    """Load a released head, whatever its algorithm.

    Args:
        path: directory or hub id.
        info: the `TargetInfo` of the target it shall serve.
        dtype: dtype in memory.
        shardings: as in `io.hf.load_params`.

    Returns:
        (head, weights).

    Raises:
        PairingError: head and target do not belong together.
        CheckpointError: a malformed checkpoint, or an algorithm that is not known.
    """
    from specjax.heads import eagle3_layouts

    return eagle3_layouts.load_eagle3(path, info, dtype, shardings)


def save(head: Any, params: Any, path: str | Path, dtype: str | None = None) -> None:
    """Write a head in its released layout, whole or not at all.

    Args:
        head: the head.
        params: its weights.
        path: directory, made if needed.
        dtype: dtype on disk, None to keep the weights'.

    Raises:
        CheckpointError: a head that has nothing to save, or a disk that cannot be written.
    """
    from specjax.core.errors import CheckpointError
    from specjax.heads import eagle3, eagle3_layouts

    if not isinstance(head, eagle3.Eagle3Head):
        raise CheckpointError(f"a head of kind {head.name!r} has no weights to save")
    eagle3_layouts.save_eagle3(head, params, path, dtype)
