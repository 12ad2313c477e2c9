"""Whether to verify all drafts: every rule of confidence-scheduled verification against none.

    python eval/schedules.py --target DIR --head DIR --prompts FILE --out runs/schedules

A head without confidences of its own needs Engine.argmax_confidence=True. Other rules:
--sweep Engine.verification=fixed,budget. Everything else is set as for `specjax eval`.
"""

import sys

from specjax.eval import study

SWEEPS = {"Engine.verification": "fixed,early_stop,budget,threshold"}


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return study(argv, __doc__, SWEEPS)


if __name__ == "__main__":
    sys.exit(main())
