"""Say whether this machine is set up right: `specjax doctor`.

usage: specjax doctor [--parity]

Prints platform, devices and versions, what does not fit together, and whether single operations
compute what numpy does. --parity runs a round of every target family and every head, and a training
step of every head, tiny ones, on the accelerator and on the CPU, and compares (some minutes).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specjax import cli
from specjax.core.errors import ConfigError

if TYPE_CHECKING:
    from specjax.selfcheck.operations import Check

_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Check the machine; exit code 1 if something is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        print((__doc__ or "").strip())
        return 0

    def run() -> int:
        if unknown := [word for word in words if word != "--parity"]:
            raise ConfigError(f"specjax doctor takes --parity only, not {unknown[0]}")
        return _examine("--parity" in words)

    return cli.guarded(run)


def _examine(parity_too: bool) -> int:
    import jax
    from rich.console import Console

    from specjax import __version__
    from specjax.selfcheck import environment
    from specjax.selfcheck.operations import operations

    console = Console(width=_WIDTH, highlight=False)
    found = environment.look()
    console.print(f"specjax {__version__}, platform [bold]{found.platform}[/]")
    for device in jax.devices():
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        size = f", {limit / 2**30:.0f} GiB" if limit else ""
        console.print(f"  device {device.id}: {device.device_kind}{size}")
    console.print("  " + ", ".join(f"{name} {v}" for name, v in found.versions.items()))
    for name, value in found.variables.items():
        console.print(f"  {name}={value}", markup=False)
    wrong = environment.problems(found)
    for problem in wrong:
        console.print(f"[red]wrong:[/] {problem}")
    device = jax.devices()[0]
    checks = operations(device)
    _show(console, f"operations on {device.device_kind}, against numpy", checks)
    if parity_too:
        from specjax.selfcheck.parity import parity

        with console.status("comparing") as status:
            checks += (more := parity(device, on_check=lambda c: status.update(c.name)))
        _show(console, f"{device.device_kind} against the CPU", more)
    bad = len(wrong) + sum(not check.right for check in checks)
    console.print("[green]all is well[/]" if not bad else f"[red]{bad} things are wrong[/]")
    return 1 if bad else 0


def _show(console: object, title: str, checks: Sequence[Check]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None)
    for name in ("", "difference", "limit", ""):
        table.add_column(name, justify="right" if name else "left")
    for check in checks:
        verdict = "right" if check.right else f"[red]wrong[/] {check.said}"
        table.add_row(check.name, f"{check.error:.1e}", f"{check.limit:.0e}", verdict)
    console.print(table)  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
