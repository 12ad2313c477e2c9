"""Draft heads: a package or a file each, behind one interface (`heads.base`).

This module imports no head before one is asked for, so that configurations stay light.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

# Each has a module `layouts` with `recognises`, `load` and `save`; the first that recognises a
# checkpoint reads it.
RELEASED = ("eagle3", "dflash", "mtp", "gemma4_mtp")


def load(
    path: str | Path,
    info: Any,
    dtype: str = "float32",
    shardings: Any | None = None,
    borrowed: Any | None = None,
) -> tuple[Any, Any]:
    """Load a released head, whatever its algorithm.

    Args:
        path: directory or hub id; of a target that carries MTP modules, these.
        info: the `TargetInfo` of the target it shall serve.
        dtype: dtype in memory.
        shardings: as in `io.hf.load_params`.
        borrowed: the target's embedding and output layer (`heads.base.borrow`). A head that is
            stored without these rows takes them from here, and refuses another target's.

    Returns:
        (head, weights).

    Raises:
        PairingError: head and target do not belong together.
        CheckpointError: a malformed checkpoint, or an algorithm that is not known.
    """
    from specjax.core.errors import CheckpointError
    from specjax.io.hf import read_config, resolve

    root = resolve(path)
    config = read_config(root)
    for kind in RELEASED:
        layouts = _layouts(kind)
        if layouts.recognises(config):
            return layouts.load(root, info, dtype, shardings, borrowed)
    raise CheckpointError(
        f"{root}: architectures {config.get('architectures')} is no draft head; have"
        f" {', '.join(RELEASED)}"
    )


def find(
    source: str,
    target: str | Path,
    info: Any,
    dtype: str = "float32",
    ngram: Any = None,
    borrowed: Any | None = None,
    shardings: Any | None = None,
) -> tuple[Any, Any]:
    """Return the head that a user names.

    Args:
        source: "none", "ngram", "mtp" (the modules in the target's own checkpoint),
            "small_model:DIR" (another model, directory or hub id), or the directory or hub id of
            a draft head.
        target: where the target was loaded from.
        info: its facts.
        dtype: dtype in memory.
        ngram: settings of "ngram".
        borrowed: as for `load`.
        shardings: as in `io.hf.load_params`.

    Returns:
        (head, weights).

    Raises:
        PairingError: head and target do not belong together.
        CheckpointError: as `load`, or there is no such head.
    """
    from specjax.heads.base import NullHead

    word, colon, rest = source.partition(":")
    if source == "none":
        return NullHead(), ()
    if source == "ngram":
        from specjax.heads.ngram import NgramHead

        return (NgramHead() if ngram is None else NgramHead(ngram)), ()
    if word == "small_model" and colon:
        from specjax import targets
        from specjax.heads.small_model import SmallModelHead

        model, params = targets.load(rest, dtype, shardings)
        return SmallModelHead.for_target(info, model), params
    if source == "mtp":  # its own words where the target has no modules
        return _layouts("mtp").load(target, info, dtype, shardings)
    return load(source, info, dtype, shardings, borrowed)


def save(head: Any, params: Any, path: str | Path, dtype: str | None = None) -> None:
    """Write a head in its released layout, whole or not at all.

    Args:
        head: the head; one of another kind than ours writes itself (`head.save`).
        params: its weights.
        path: directory, made if needed.
        dtype: dtype on disk, None to keep the weights'.

    Raises:
        CheckpointError: a head that has nothing to save, or a disk that cannot be written.
    """
    from specjax.core.errors import CheckpointError

    kind = "dflash" if head.name == "dspark" else head.name  # one network, one layout
    if kind not in RELEASED and hasattr(head, "save"):
        head.save(params, path, dtype)
        return
    if kind not in RELEASED:
        raise CheckpointError(f"a head of kind {head.name!r} has no weights to save")
    _layouts(kind).save(head, params, path, dtype)


def _layouts(kind: str) -> Any:
    return importlib.import_module(f"specjax.heads.{kind}.layouts")
