"""Measure decoding with and without a draft head: `specjax eval`, `python -m specjax.eval`.

usage: specjax eval [--target DIR] [--head DIR] [--prompts FILE] [--out DIR] [Name.x=value ...]

With no setting it evaluates the embedded default (configs/eval/default.gin).
"""

import sys
from collections.abc import Sequence

from specjax.cli import run_door
from specjax.config import Config

SHORT = {
    "target": "Eval.target",
    "head": "Eval.head",
    "prompts": "Eval.prompts",
    "out": "Eval.out",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run an evaluation; see `specjax.cli.main` for the exit code."""
    return run_door(
        _evaluate,
        argv,
        usage=__doc__ or "",
        names=("Eval", "Target", "Engine", "Ngram"),
        short=SHORT,
        default="eval/default.gin",
    )


def _evaluate(config: Config) -> None:
    evaluation = config.build("Eval")
    config.check_all_used()
    from specjax.evaluation import runner  # imports jax: not before the settings are known good

    runner.run(evaluation, operative=config.operative())


if __name__ == "__main__":
    sys.exit(main())
