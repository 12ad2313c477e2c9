"""Measure decoding with and without a draft head: `specjax eval`, `python -m specjax.eval`.

usage: specjax eval [--target DIR] [--head DIR] [--prompts FILE] [--out DIR] [--trace N]
                    [--sweep NAME=V1,V2,...]... [Name.x=value ...]

With no setting it evaluates the embedded default (configs/eval/default.gin). With --out naming the
directory of an interrupted sweep, the sweep goes on there.
"""

import ast
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.cli import run_door
from specjax.config import Config
from specjax.core.errors import ConfigError

NAMES = ("Eval", "Sweep", "Target", "Engine", "Mesh", "Ngram")
SHORT = {
    "target": "Eval.target",
    "head": "Eval.head",
    "prompts": "Eval.prompts",
    "out": "Eval.out",
    "trace": "Eval.trace",
    "sweep-cells": "Sweep.cells",
}
FLAGS = {
    "sweep": "NAME=V1,V2,... runs every value; several give every combination. A parameter of"
    " Eval\n                 needs no prefix: --sweep num_speculative_tokens=1,3,7",
}
DEFAULT = "eval/default.gin"


def main(argv: Sequence[str] | None = None, usage: str = __doc__ or "") -> int:
    """Run evaluations; see `specjax.cli.main` for the exit code, which is 1 if a cell failed."""
    return run_door(
        evaluate,
        argv,
        usage=usage,
        names=NAMES,
        short=SHORT,
        flags=FLAGS,
        default=DEFAULT,
        rewrite=with_grid,
        together=True,
    )


def study(argv: Sequence[str] | None, usage: str | None, sweeps: Mapping[str, str]) -> int:
    """Run evaluations over these sweeps, but for those that the words name otherwise.

    Args:
      argv: the words; None takes them from the process.
      usage: what `--help` prints.
      sweeps: lists of values, with commas between, by parameter.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    given = " ".join(words)
    ours = [
        f"--sweep={name}={values}" for name, values in sweeps.items() if f"{name}=" not in given
    ]
    return main([*ours, *words], usage or "")


def with_grid(words: Sequence[str]) -> list[str]:
    """The words with `--sweep NAME=V1,V2` turned into a setting of `Sweep.grid`.

    Raises:
      ConfigError: a sweep without name or values, or over one parameter twice.
    """
    kept: list[str] = []
    grid: dict[str, tuple[Any, ...]] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if flag != "--sweep":
            kept.append(word)
            continue
        if not equals:
            text = next(rest, "")
        name, equals, values = text.partition("=")
        if not (name and equals and values):
            raise ConfigError(f"--sweep {text!r} should read NAME=V1,V2,...")
        if name in grid:
            raise ConfigError(f"--sweep names {name} twice")
        grid[name] = tuple(_literal(part.strip()) for part in _split(values))
    return [*kept, f"Sweep.grid={grid!r}"] if grid else kept


def _split(text: str) -> list[str]:
    """Text at its commas, but for those inside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if sign == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += sign
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        else:
            depth += (sign in "([{") - (sign in ")]}")
    return parts


def _literal(text: str) -> Any:
    """What a value on the command line means; what is no literal is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def evaluate(config: Config) -> int:
    """Run what a configuration describes; returns the exit code."""
    from specjax.evaluation.config import cell_settings

    sweep = config.build("Sweep")
    cells = [config.override(values, "in the sweep") for values in cell_settings(sweep)]
    evaluations = []
    for cell in cells:
        cell.build("Sweep")
        evaluations.append(cell.build("Eval"))
        cell.check_all_used()
    from specjax.evaluation import runner  # imports jax: not before the settings are known good

    rows = runner.run_sweep(evaluations, sweep, cells[0].operative())
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
