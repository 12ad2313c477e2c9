"""Train an EAGLE-3 head for a target.

    python train/eagle3.py --gin_file=train/eagle3_smollm2.gin \
        --target TARGET_DIR --data answers.jsonl --out runs/eagle3

Without --gin_file the recipe is configs/heads/eagle3.gin. The same command goes on where an
interrupted run stands. The trained head is written to OUT/head.
"""

import sys
from typing import Any

from specjax.train_door import train_door


def make(target: Any, settings: Any, borrowed: Any, key: Any, kept: Any) -> tuple[Any, Any]:
    """Return (head, fresh weights)."""
    from specjax.heads.eagle3.head import Eagle3Head

    size = None if kept is None else len(kept)
    head = Eagle3Head.for_target(target.info, target.info.draft_block, settings, size)
    return head, head.init(key, borrowed, kept)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return train_door(argv, usage=__doc__, head="Eagle3", make=make, recipe="heads/eagle3.gin")


if __name__ == "__main__":
    sys.exit(main())
