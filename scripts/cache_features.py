"""Write the features of a target that a draft head is trained on, for training without the target.

    python scripts/cache_features.py --gin_file=train/eagle3_smollm2.gin --head eagle3 \
        --target TARGET_DIR --data answers.jsonl --out features

takes the settings of the training run (train/eagle3.py), which then reads them with
Trainer.features=features. Features.taps adds what other heads want. Killed at any moment, the same
command goes on.
"""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from specjax.cli import run_door
from specjax.config import Config
from specjax.core.errors import ConfigError, nearest

HEADS = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DFlash", "mtp": "Mtp"} | {
    "gemma4_mtp": "Gemma4Mtp"
}
SHORT = {
    "target": "Trainer.target",
    "data": "Data.files",
    "out": "Trainer.features",
    "head": "Features.head",
    "storage": "Features.storage",
}
_OUT = "(not a training run)"


def head_of(name: str, settings: Any, info: Any) -> Any:
    """Return the head that a training script would make of the settings.

    Args:
        name: one of HEADS.
        settings: of the head.
        info: the target's facts.
    """
    from specjax.heads.dflash.head import DFlashHead
    from specjax.heads.eagle3.head import Eagle3Head
    from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
    from specjax.heads.mtp.head import MtpHead

    if name == "eagle3":
        return Eagle3Head.for_target(info, info.draft_block, settings)
    made = {"mtp": MtpHead, "gemma4_mtp": Gemma4MtpHead}.get(name, DFlashHead)
    return made.for_target(info, settings)


def body(config: Config) -> None:
    """Cache the features that a configuration asks for."""
    run, how = config.build("Trainer", out=_OUT), config.build("Features")
    settings = config.build(HEADS[how.head]) if how.head in HEADS else None
    if how.head and settings is None and "/" not in how.head and not Path(how.head).is_dir():
        raise ConfigError(
            f"--head {how.head} is neither one of {', '.join(HEADS)} nor the folder of a head"
            f"{nearest(how.head, HEADS)}"
        )
    config.check_all_used()
    if not run.features:
        raise ConfigError("--out (Trainer.features) must name the folder of the cache")

    from specjax import heads, targets
    from specjax.heads.base import NullHead, borrow
    from specjax.training import rows
    from specjax.training.features.fill import fill, place

    split = place(run, how).target if run.mesh.devices > 1 else None
    target, params = targets.load(run.target, run.target_dtype, split, run.target_options)
    data = rows.load(run, target.info.stop_ids)
    console = Console(stderr=True)
    console.print(data.report, highlight=False, markup=False, soft_wrap=True)
    source = run.init_from or ("" if settings else how.head)
    if source:  # a head that exists has its taps already
        lent = borrow(target, params)
        head, _ = heads.find(source, run.target, target.info, borrowed=lent)
    else:
        head = head_of(how.head, settings, target.info) if settings else NullHead()
    wants = (head.taps, head.reads)
    line = fill(run, how, target, params, wants, data, console)
    Console().print(line, highlight=False, markup=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    names = ("Features", "Trainer", "Mesh", "Target", "Data", *dict.fromkeys(HEADS.values()))
    return run_door(body, argv, usage=__doc__ or "", names=names, short=SHORT)


if __name__ == "__main__":
    sys.exit(main())
