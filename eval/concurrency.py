"""Where speculation stops to pay: the same heads with more and more prompts decoded together.

    python eval/concurrency.py --target DIR --head DIR --prompts FILE --out runs/concurrency

Every concurrency has its own baseline; give at least as many prompts as the largest. Other values:
--sweep concurrency=4,64. Everything else is set as for `specjax eval`.
"""

import sys

from specjax.eval import study

SWEEPS = {"concurrency": "1,2,4,8"}


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return study(argv, __doc__, SWEEPS)


if __name__ == "__main__":
    sys.exit(main())
