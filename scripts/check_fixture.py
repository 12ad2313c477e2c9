"""Compare this framework with a reference's stored tensors, one fixture directory at a time.

    python scripts/check_fixture.py DIR --output OUT.safetensors [--strict]

DIR holds `config.json` and weights as a released checkpoint has them, and `expected.safetensors`
with the reference's inputs and, if they are to be compared, its outputs. Every tensor that the
framework can compute is computed with the functions that engine and trainer call, written to OUT
under the fixture's name, and compared. This is how one checks a checkpoint being ported: dump a
few tensors from its own code and name them as `docs/` and the fixtures in `tests/` do.

Exit code: 0 all that was compared agrees, 1 something differs (with --strict also: something was
not computed), 2 the directory cannot be used.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.fixture_checks.compare import compare, print_table
from scripts.fixture_checks.fixture import read_fixture
from specjax.core.errors import CheckpointError, SpecJaxError


def check(directory: Path, output: Path, strict: bool, console: Console) -> int:
    """Compute, write, compare and print; return the exit code."""
    from scripts.fixture_checks.dispatch import compute
    from specjax.io.hf import write_safetensors

    fixture = read_fixture(directory)
    try:
        outcome = compute(fixture)
    except (TypeError, ValueError) as error:  # shapes that contradict each other, mostly
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{directory}: its tensors do not fit together: {reason}") from error
    write_safetensors(outcome.tensors, output)
    lines = compare(fixture, outcome)
    print_table(fixture.name, lines, console)
    failed = [line for line in lines if line.failed or (strict and line.absent)]
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="fixture directory")
    parser.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--strict", action="store_true", help="fail where a tensor is not computed")
    args = parser.parse_args(argv)
    try:
        return check(args.directory, args.output, args.strict, Console())
    except SpecJaxError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
