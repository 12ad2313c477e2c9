"""Plan a target and a head on a machine that you do not have: `specjax plan`.

usage: specjax plan [--target NAME] [--head NAME] [--chip CHIP] [--mesh tensor=8] [Name.x=value ...]

The real round of the engine is traced on shapes, without a weight, and counted: what fits, what is
computed, read and sent, the least time that takes on the chip, and, with --acceptance, the speedup
by drafts, lanes and context: the best setting, and where speculation stops paying.
"""

import sys
from collections.abc import Sequence

from specjax.cli import run_door
from specjax.config import Config
from specjax.core.errors import ConfigError, nearest
from specjax.core.mesh_config import AXES

NAMES = ("Plan", "Mesh", "Target")
SHORT = {
    name: f"Plan.{name}"
    for name in ("target", "head", "chip", "acceptance", "batches", "contexts", "dtype", "out")
}
FLAGS = {"mesh": "devices by axis, as tensor=8 or data=2,tensor=4: short for Mesh.tensor, ..."}


def main(argv: Sequence[str] | None = None) -> int:
    """Plan; see `specjax.cli.main` for the exit code."""
    return run_door(
        plan, argv, usage=__doc__ or "", names=NAMES, short=SHORT, flags=FLAGS, rewrite=rewrite
    )


def rewrite(words: Sequence[str]) -> list[str]:
    """Turn `--mesh tensor=8,data=2` into settings of Mesh.

    Raises:
        ConfigError: an axis that there is not, or no number.
    """
    out: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if flag != "--mesh":
            out.append(word)
            continue
        text = text if equals else next(rest, "")
        for part in text.split(","):
            axis, equals, size = part.strip().partition("=")
            if axis not in AXES or not size.isdigit():
                raise ConfigError(
                    f"--mesh {text!r}: write axis=devices, as tensor=8 or data=2,tensor=4"
                    f"{nearest(axis, AXES)} (axes: {', '.join(AXES)})"
                )
            out.append(f"Mesh.{axis}={size}")
    return out


def plan(config: Config) -> None:
    """Plan what a configuration describes."""
    settings = config.build("Plan")
    config.check_all_used()
    # They import jax: not before all is known to be well written.
    from rich.console import Console

    from specjax.evaluation.runner import writable
    from specjax.planner import plan as planning
    from specjax.planner import report

    console = Console()
    if not console.is_terminal:
        console.width = report.WIDTH
    directory = writable(settings.out)
    with console.status("tracing") as status:
        made = planning.make(settings, lambda i, n: status.update(f"tracing round {i + 1} of {n}"))
    report.show(made, console)
    report.write(made, directory)
    console.print(
        f"Results: {directory / report.RECORD}, {directory / report.FIGURE}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
