"""Train a Gemma 4 MTP head for a target.

    python train/gemma4_mtp.py --gin_file=train/gemma4_mtp_smollm2.gin \
        --target TARGET_DIR --data answers.jsonl --out runs/gemma4_mtp

Without --gin_file the recipe is configs/heads/gemma4_mtp.gin. The same command goes on where an
interrupted run stands. The trained head is written to OUT/head.
"""

import sys
from typing import Any

from specjax.train_door import train_door


def make(target: Any, settings: Any, borrowed: Any, key: Any, kept: Any) -> tuple[Any, Any]:
    """Return (head, fresh weights)."""
    from specjax.heads.gemma4_mtp.head import Gemma4MtpHead

    del kept
    head = Gemma4MtpHead.for_target(target.info, settings)
    return head, head.init(key, borrowed)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return train_door(
        argv, usage=__doc__, head="Gemma4Mtp", make=make, recipe="heads/gemma4_mtp.gin"
    )


if __name__ == "__main__":
    sys.exit(main())
