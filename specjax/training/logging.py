"""What a run says while it runs: a JSON line per record, and progress on the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specjax.core import hosts

_SHOWN = {
    "loss": "loss {:.4f}",
    "acceptance": "acceptance {:.3f}",
    "tau_greedy": "tau {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


class JsonLines:
    """A log of one JSON object per line, ordered by step."""

    def __init__(self, path: Path) -> None:
        """Remember where the log lies; nothing is written yet."""
        self.path = path

    def cut(self, step: int) -> None:
        """Drop records after `step` (they will be made again) and a torn last line."""
        if not hosts.is_lead() or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # torn by a kill
            if record["step"] <= step:
                kept.append(line + "\n")
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, self.path)

    def last(self) -> Mapping[str, Any]:
        """Return the newest record, empty if there is none or another process writes them."""
        if not hosts.is_lead():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return json.loads(lines[-1]) if lines else {}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, in the process that writes."""
        if not hosts.is_lead():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class Display:
    """A progress bar on a terminal, a plain line per record elsewhere."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        """Prepare for a run of `steps`, of which one process tells; use as a context manager."""
        self.console = console or Console(stderr=True, quiet=not hosts.is_lead())
        self._steps = steps
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, shown="compiling")

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, step: int) -> None:
        """Start the bar at a resumed step, for the remaining time to be right."""
        self._bar.update(self._task, completed=step)

    def step(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def record(self, record: Mapping[str, Any], remaining: float) -> None:
        """Show a record; `remaining` seconds are printed where there is no bar."""
        shown = "  ".join(
            form.format(record[name]) for name, form in _SHOWN.items() if name in record
        )
        self._bar.update(self._task, shown=shown)
        if not self.console.is_terminal:
            minutes = f"{remaining / 60:.0f} min left"
            self.say(f"step {record['step']}/{self._steps}  {shown}  {minutes}")
