"""Target models: one module per family, loaded from published checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.core.errors import CheckpointError, nearest
from specjax.io.hf import load_params, read_config, read_stop_ids, resolve
from specjax.targets import llama, qwen3
from specjax.targets.base import Cache, Target, TargetInfo, TargetOut

FAMILIES = {"llama": llama.FAMILY, "qwen3": qwen3.FAMILY}

__all__ = ["FAMILIES", "Cache", "Target", "TargetInfo", "TargetOut", "from_config", "load"]


def from_config(config: Mapping[str, Any]) -> Target:
    """Build a target from a published configuration.

    Raises:
        CheckpointError: the `model_type` is missing or not one of FAMILIES.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"config.json: model_type {kind!r} is not supported; have {known}"
            + nearest(str(kind), FAMILIES)
        )
    family = FAMILIES[kind]
    return Target(family=family, config=family.read_config(config))


def load(
    path: str | Path, dtype: str = "float32", shardings: Any | None = None
) -> tuple[Target, Any]:
    """Load a published checkpoint: a directory, or a hub id where there is a network.

    Args:
        path: Hugging Face directory, `hf://owner/name` or `owner/name`.
        dtype: dtype of the weights in memory.
        shardings: one sharding for every weight, a tree of them, or None for the default device.

    Returns:
        (target, params).

    Raises:
        CheckpointError: anything wrong with the directory, named.
    """
    root = resolve(path)
    config = read_config(root)
    stops = read_stop_ids(root, config)
    target = from_config({**config, "eos_token_id": list(stops)})
    ignored = list(target.family.ignored)
    if config.get("tie_word_embeddings"):
        ignored.append("lm_head.weight")  # some tied checkpoints carry the copy
    params = load_params(target.specs(), root, dtype, shardings, ignore=tuple(ignored))
    return target, params
