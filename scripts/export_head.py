"""Write a trained head in a published layout, with its configuration and a model card.

    python scripts/export_head.py HEAD_DIR --target TARGET --layout speculators --out DIR \\
        [--results RESULTS.jsonl ...] [--verifier HUB_ID] [--dtype bfloat16] [--bodies-only]

`speculators` is the format that vLLM loads, `original` that of the algorithm's authors; a layout
that cannot express the head is refused. --verifier is what other packages load the target by
(default: TARGET as given). --results takes the measured figures of an evaluation. --bodies-only
leaves out embedding and output rows that are the target's bit for bit: SpecJAX then takes them from
the target and refuses another one; vLLM needs the file with them where the vocabulary is reduced.
What was written is read back and compared before the command ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specjax.cli import guarded
from specjax.core.errors import CheckpointError

if TYPE_CHECKING:
    from specjax.heads.export import Exported

LAYOUTS = ("speculators", "original", "safeai", "deepspec", "zlab")


def run(args: argparse.Namespace, console: Console) -> None:
    """Load, convert, write, read back, and write the card."""
    from specjax import heads, targets
    from specjax.evaluation import model_card, records
    from specjax.heads.base import borrow
    from specjax.heads.export import Verifier, export
    from specjax.io.hf import read_config, resolve

    root = resolve(args.target)
    measured = [row for file in args.results for row in records.read(_folder(file))]
    target, weights = targets.load(root, args.dtype)
    borrowed = borrow(target, weights)
    head, params = heads.load(args.head, target.info, args.dtype, borrowed=borrowed)
    runs = model_card.runs_of(measured, head.name) if measured else []
    architectures = tuple(read_config(root).get("architectures") or ())
    verifier = Verifier(args.verifier or args.target, architectures)
    exported = export(
        head,
        params,
        borrowed,
        args.out,
        layout=args.layout,
        verifier=verifier,
        dtype=args.dtype,
        bodies_only=args.bodies_only,
    )
    _, again = heads.load(args.out, target.info, args.dtype, borrowed=borrowed)
    _compare(exported, again, args.out)
    before = resolve(args.head) / "README.md"
    training = before.read_text(encoding="utf-8") if before.is_file() else ""
    card = model_card.model_card(
        exported, verifier, args.dtype, runs, model_card.training_part(training)
    )
    records.write_whole(args.out / "README.md", card)
    size = (args.out / "model.safetensors").stat().st_size
    console.print(f"{head.name} head in {exported.layout} layout: {args.out}, {size / 1e6:.1f} MB")
    if exported.left_out:
        console.print(f"left out, the target's rows: {', '.join(exported.left_out)}")
    elif args.bodies_only:
        console.print("nothing left out: the file holds no rows that are the target's")


def _folder(file: Path) -> Path:
    return file if file.is_dir() else file.parent


def _compare(exported: Exported, params: Any, out: Path) -> None:
    """Refuse to end well if the file does not give the same weights again."""
    import jax
    import jax.numpy as jnp

    ours = exported.params
    for name in exported.left_out:
        if getattr(params, name) is None:  # borrowed while running
            ours = dataclasses.replace(ours, **{name: None})
    same = jax.tree.structure(ours) == jax.tree.structure(params)
    if not (same and all(jax.tree.leaves(jax.tree.map(jnp.array_equal, ours, params)))):
        raise CheckpointError(f"{out} does not read back as it was written")


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("head", metavar="HEAD_DIR", help="directory of a trained head")
    parser.add_argument("--target", required=True, help="directory or hub id")
    parser.add_argument("--layout", required=True, choices=LAYOUTS)
    parser.add_argument("--out", required=True, type=Path, help="directory of the export")
    parser.add_argument(
        "--results", type=Path, action="append", default=[], help="results.jsonl of an evaluation"
    )
    parser.add_argument("--verifier", default="", help="the target's name for other packages")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--bodies-only", action="store_true", help="without the target's rows")
    args = parser.parse_args(argv)

    def body() -> int:
        run(args, Console(width=100))
        return 0

    return guarded(body)


if __name__ == "__main__":
    sys.exit(main())
