"""What every `train/<head>.py` shares: settings in, a trained head out.

A script gives its head's configurable and a function that makes the head; nothing here knows an
algorithm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specjax.cli import run_door
from specjax.config import Config

if TYPE_CHECKING:
    import jax
    import numpy as np

    from specjax.heads.base import Borrowed
    from specjax.targets.base import Target

Make = Callable[["Target", Any, "Borrowed", "jax.Array", "np.ndarray | None"], tuple[Any, Any]]

_SHORT = {
    "target": "Trainer.target",
    "out": "Trainer.out",
    "data": "Data.files",
    "init_from": "Trainer.init_from",
}


def train_door(
    argv: Sequence[str] | None, *, usage: str | None, head: str, make: Make, recipe: str
) -> int:
    """Run a training script.

    Args:
        argv: the words after the script's name; None takes them from the process.
        usage: the script's docstring.
        head: name of the head's configurable.
        make: called with (target, settings, the target's embedding and output, a random key, the
            target ids of the draft vocabulary or None); returns (head, weights to start from).
        recipe: the configuration read when none is named.

    Returns:
        The exit code: 0 done, 2 a mistake in what the user gave, 130 interrupted.
    """
    drafts_few = _has_vocabulary(head)

    def body(config: Config) -> None:
        run, settings = config.build("Trainer"), config.build(head)
        config.check_all_used()

        import jax

        from specjax import targets
        from specjax.core import hosts
        from specjax.heads.base import borrow
        from specjax.training.placement import Placement
        from specjax.training.run import read_kept, train
        from specjax.training.warm_start import warm_start

        place = Placement.of(run.mesh, run.batch_size)  # refuses meshes before anything is read
        runs = not run.features or run.decode_every > 0  # else nothing runs the target's layers
        target, weights = targets.load(
            run.target,
            run.target_dtype,
            place.target if run.mesh.devices > 1 else None,
            run.target_options,
            layers=runs,
        )
        if run.init_from:
            made, params, said = warm_start(run, target, weights, settings, head)
            if hosts.is_lead():
                print(said, file=sys.stderr)
        else:
            kept = read_kept(settings.draft_vocab) if drafts_few and settings.draft_vocab else None
            drawn = jax.random.key(run.seed)
            made, params = make(target, settings, borrow(target, weights), drawn, kept)
        train(run, target, weights, made, params, config.operative())

    short = {**_SHORT, "draft_vocab": f"{head}.draft_vocab"} if drafts_few else _SHORT
    names = ("Trainer", "Target", "Data", "Optim", head, "Objective")
    return run_door(
        body, argv, usage=usage or "", names=names, short=short, default=recipe, together=True
    )


def _has_vocabulary(head: str) -> bool:
    from specjax import configurables

    return "draft_vocab" in configurables.parameters(head)
