"""Target models: one module per family, loaded from published checkpoints.

Names are looked up when first used, so that the settings (`targets.config`) and the catalogue stay
light to import.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "FAMILIES": "specjax.targets.loading",
    "from_config": "specjax.targets.loading",
    "load": "specjax.targets.loading",
    "text_config": "specjax.targets.loading",
    "Cache": "specjax.targets.base",
    "Target": "specjax.targets.base",
    "TargetInfo": "specjax.targets.base",
    "TargetOut": "specjax.targets.base",
    "TargetConfig": "specjax.targets.config",
}

__all__ = [
    "FAMILIES",
    "Cache",
    "Target",
    "TargetConfig",
    "TargetInfo",
    "TargetOut",
    "from_config",
    "load",
    "text_config",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
