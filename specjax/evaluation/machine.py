"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import jax

from specjax import __version__


def describe() -> dict[str, Any]:
    """Return the facts of machine and software that a measured time depends on."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": _memory_bytes(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "specjax": __version__,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX
        return None
