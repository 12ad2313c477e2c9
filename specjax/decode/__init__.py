"""The decode loop: one jitted round, lanes, refill.

Names are looked up when first used, so that the settings (`decode.config`) stay light to import.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Engine": "specjax.decode.engine",
    "EngineConfig": "specjax.decode.config",
    "Request": "specjax.decode.requests",
    "Result": "specjax.decode.requests",
    "RunTimes": "specjax.decode.requests",
}

__all__ = ["Engine", "EngineConfig", "Request", "Result", "RunTimes"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
