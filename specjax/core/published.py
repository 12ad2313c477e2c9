"""Reading fields of a published `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import CheckpointError


def required(config: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    """Return fields of a published configuration.

    Raises:
        CheckpointError: fields that are missing, all named.
    """
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    return tuple(config[name] for name in names)
