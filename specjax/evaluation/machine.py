"""What a figure was measured on."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
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


def reset_peak_memory() -> None:
    """Start a new peak where the system can: the resident memory of a process on Linux."""
    # Elsewhere, or where it is not allowed, the peak is that of the whole process.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory_bytes() -> int | None:
    """Return the most memory in use: of the fullest accelerator, else of this process.

    An accelerator's peak is that of the whole process so far; on Linux without one it is the peak
    since `reset_peak_memory`.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [found.get("peak_bytes_in_use", 0) for found in stats if found]
    if any(peaks):
        return int(max(peaks))
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
