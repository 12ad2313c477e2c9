"""Train an EAGLE-3 head for a target.

    python train/eagle3.py --gin_file=train/eagle3_smollm2.gin \
        --target TARGET_DIR --data answers.jsonl --out runs/eagle3

The same command goes on where an interrupted run stands. The trained head is written to OUT/head.
"""

import sys

from specjax.cli import run_door
from specjax.config import Config

SHORT = {
    "target": "Trainer.target",
    "out": "Trainer.out",
    "data": "Data.files",
    "draft_vocab": "Eagle3.draft_vocab",
}


def body(config: Config) -> None:
    """Build the head that the configuration describes and hand it to the trainer."""
    run, settings = config.build("Trainer"), config.build("Eagle3")
    config.check_all_used()

    import jax

    from specjax import targets
    from specjax.heads.base import borrow
    from specjax.heads.eagle3.head import Eagle3Head
    from specjax.training.run import read_kept, train

    target, weights = targets.load(run.target, run.target_dtype, how=run.target_options)
    kept = read_kept(settings.draft_vocab) if settings.draft_vocab else None
    size = None if kept is None else len(kept)
    head = Eagle3Head.for_target(target.info, target.info.draft_block, settings, size)
    params = head.init(jax.random.key(run.seed), borrow(target, weights), kept)
    train(run, target, weights, head, params, config.operative())


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    names = ("Trainer", "Target", "Data", "Optim", "Eagle3")
    return run_door(body, argv, usage=__doc__, names=names, short=SHORT)


if __name__ == "__main__":
    sys.exit(main())
