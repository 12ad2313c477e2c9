"""Compare numbers of speculative tokens of one head, in one table, against one baseline.

    python eval/compare.py --tokens "(1, 2, 4, 7)" \
        --target TARGET_DIR --head HEAD_DIR --prompts prompts.jsonl --out runs/compare

All runs alternate in one process, so they share the baseline and the machine's moods. Everything
else is set as for `specjax eval`; without --target it compares on the embedded default.
"""

import dataclasses
import sys

from specjax.cli import run_door
from specjax.config import Config
from specjax.configurables import register
from specjax.core.errors import ConfigError
from specjax.eval import SHORT


@dataclasses.dataclass(frozen=True)
class Compare:
    """What to compare.

    Attributes:
        tokens: numbers of speculative tokens, one run for each.
    """

    tokens: tuple[int, ...] = (1, 2, 4, 7)

    def __post_init__(self) -> None:
        """Refuse an empty list, a repeated number and anything below 1."""
        if not self.tokens or min(self.tokens) < 1 or len(set(self.tokens)) < len(self.tokens):
            raise ConfigError(f"Compare.tokens {self.tokens}: give different numbers from 1 on")


def body(config: Config) -> None:
    """Run the comparison that the configuration describes."""
    evaluation, compare = config.build("Eval"), config.build("Compare")
    config.check_all_used()
    from specjax.evaluation.runner import run_token_counts

    run_token_counts(evaluation, compare.tokens, config.operative())


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    register("Compare", Compare)
    names = ("Compare", "Eval", "Target", "Engine")
    short = {"tokens": "Compare.tokens", **SHORT}
    return run_door(body, argv, usage=__doc__ or "", names=names, short=short)


if __name__ == "__main__":
    sys.exit(main())
