"""Train Native MTP modules for a target.

    python train/mtp.py --gin_file=train/mtp_smollm2.gin \
        --target TARGET_DIR --data answers.jsonl --out runs/mtp

Without --gin_file the recipe is configs/heads/mtp.gin. The same command goes on where an
interrupted run stands. The trained head is written to OUT/head.
"""

import sys
from typing import Any

from specjax.train_door import train_door


def make(target: Any, settings: Any, borrowed: Any, key: Any, kept: Any) -> tuple[Any, Any]:
    """Return (head, fresh weights)."""
    from specjax.heads.mtp.head import MtpHead

    del kept
    head = MtpHead.for_target(target.info, settings)
    return head, head.init(key, borrowed)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return train_door(argv, usage=__doc__, head="Mtp", make=make, recipe="heads/mtp.gin")


if __name__ == "__main__":
    sys.exit(main())
