"""What sampling does to acceptance: the same heads from greedy to temperature 1.

    python eval/temperatures.py --target DIR --head DIR --prompts FILE --out runs/temperatures

Every temperature has its own baseline. Other values: --sweep temperature=0,0.3. Everything else is
set as for `specjax eval`.
"""

import sys

from specjax.eval import study

SWEEPS = {"temperature": "0.0,0.5,0.7,1.0"}


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return study(argv, __doc__, SWEEPS)


if __name__ == "__main__":
    sys.exit(main())
