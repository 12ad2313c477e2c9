"""Train a DFlash head for a target.

    python train/dflash.py --gin_file=train/dflash_smollm2.gin \
        --target TARGET_DIR --data answers.jsonl --out runs/dflash

Without --gin_file the recipe is configs/heads/dflash.gin. The same command goes on where an
interrupted run stands. The trained head is written to OUT/head.
"""

import sys
from typing import Any

from specjax.train_door import train_door


def make(target: Any, settings: Any, borrowed: Any, key: Any, kept: Any) -> tuple[Any, Any]:
    """Return (head, fresh weights)."""
    from specjax.heads.dflash.head import DFlashHead

    size = None if kept is None else len(kept)
    head = DFlashHead.for_target(target.info, settings, size)
    return head, head.init(key, borrowed, kept)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return train_door(argv, usage=__doc__, head="DFlash", make=make, recipe="heads/dflash.gin")


if __name__ == "__main__":
    sys.exit(main())
