"""How many tokens to draft: a head, or several, at growing numbers of speculative tokens.

    python eval/widths.py --target DIR --head DIR --prompts FILE --out runs/widths

All cells alternate with one baseline, so they share the machine's moods. Other numbers:
--sweep num_speculative_tokens=2,6. Everything else is set as for `specjax eval`.
"""

import sys

from specjax.eval import study

SWEEPS = {"num_speculative_tokens": "1,2,3,5,7"}


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return study(argv, __doc__, SWEEPS)


if __name__ == "__main__":
    sys.exit(main())
