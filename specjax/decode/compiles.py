"""Counting and timing compilations, so that they stay out of every figure and tests can count."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import jax

# jax reports durations by event name; these three are what a first call pays beyond running.
_PARTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_active: list[CompileClock] = []
_registered = False


def _listen(event: str, duration: float, **_: Any) -> None:
    if event in _PARTS:
        for clock in _active:
            clock.seconds += duration
            clock.count += event == _PARTS[-1]


class CompileClock:
    """Counts programs compiled, and seconds of tracing, lowering and compiling, while entered.

    Attributes:
        seconds: time spent so far.
        count: programs compiled so far.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds = 0.0
        self.count = 0

    def __enter__(self) -> CompileClock:
        """Begin counting."""
        global _registered
        if not _registered:  # listeners cannot be taken back, so there is one for the process
            jax.monitoring.register_event_duration_secs_listener(_listen)
            _registered = True
        _active.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop counting."""
        _active.remove(self)
