"""Find the best number of speculative tokens: `specjax tune`, `python -m specjax.tune`.

usage: specjax tune [--target DIR] [--head DIR] [--prompts FILE] [--out DIR] [Name.x=value ...]

One run records what the head would draft everywhere, a profile times rounds, every setting (the
number, and the schedule where a head has confidences) is predicted from the two, and the best few
are run beside the baseline. It ends with the settings to use. A dozen prompts are enough:
Eval.num_prompts=12. With no setting it tunes the embedded default.
"""

import sys
from collections.abc import Sequence

from specjax.cli import run_door
from specjax.config import Config

NAMES = ("Tune", "Eval", "Target", "Engine", "Mesh", "Ngram")
SHORT = {
    "target": "Eval.target",
    "head": "Eval.head",
    "prompts": "Eval.prompts",
    "out": "Eval.out",
}
DEFAULT = "eval/default.gin"


def main(argv: Sequence[str] | None = None) -> int:
    """Tune; see `specjax.cli.main` for the exit code."""
    return run_door(tune, argv, usage=__doc__ or "", names=NAMES, short=SHORT, default=DEFAULT)


def tune(config: Config) -> None:
    """Tune what a configuration describes."""
    settings, evaluation = config.build("Tune"), config.build("Eval")
    config.check_all_used()
    from specjax.evaluation import tune as tuning  # imports jax: not before all is known good

    tuning.run(evaluation, settings)


if __name__ == "__main__":
    sys.exit(main())
