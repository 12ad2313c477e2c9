"""Calibrate a DSpark head's confidences on prompts it was not trained on, and save them with it.

    python scripts/calibrate.py --target DIR --head DIR --prompts FILE.jsonl --out DIR

Every draft is verified; the temperatures are fitted on every other prompt, and the calibration
error of the survival products is reported on the rest, before and after. OUT gets the head with
its temperatures. They belong to this target, this kind of prompts and this sampling temperature.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specjax.cli import guarded
from specjax.core.errors import PairingError


def run(args: argparse.Namespace, console: Console) -> None:
    """Load, decode, fit, save and print."""
    from specjax import heads
    from specjax.decode import Engine, EngineConfig
    from specjax.evaluation import subject
    from specjax.evaluation.calibrate import calibrate, record_rounds
    from specjax.evaluation.config import EvalConfig
    from specjax.io.hf import resolve

    loaded = subject.load(
        EvalConfig(
            target=args.target,
            head=args.head,
            prompts=args.prompts,
            num_prompts=args.num_prompts,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            dtype=args.dtype,
            baseline_dtypes=(args.dtype,),
        )
    )
    if not getattr(loaded.head, "has_confidence", False):
        raise PairingError(f"{args.head}: a {loaded.head.name} head gives no confidences")
    head = dataclasses.replace(loaded.head, temperatures=())
    config = EngineConfig(num_speculative_tokens=head.max_tokens, concurrency=args.concurrency)
    engine = Engine(loaded.target, loaded.params[args.dtype], head, loaded.head_params, config)
    with Progress(console=console) as bar:
        task = bar.add_task("decoding", total=len(loaded.requests))
        rounds = record_rounds(
            engine, loaded.requests, lambda done: bar.update(task, completed=done)
        )
    found = calibrate(rounds)
    grid = Table(title=f"survival to each draft, {found.heldout} held-out rounds", box=None)
    for name in ("draft", "temperature", "error before", "error after"):
        grid.add_column(name, justify="right")
    for k, row in enumerate(zip(found.temperatures, found.before, found.after, strict=True)):
        grid.add_row(str(k + 1), f"{row[0]:.2f}", f"{row[1]:.4f}", f"{row[2]:.4f}")
    console.print(grid)
    tuned = dataclasses.replace(head, temperatures=tuple(map(float, found.temperatures)))
    heads.save(tuned, loaded.head_params, args.out)
    card = resolve(args.head) / "README.md"
    if card.is_file() and card.parent.resolve() != args.out.resolve():
        shutil.copyfile(card, args.out / card.name)
    console.print(f"fitted on {found.fitted} rounds; the head with its temperatures: {args.out}")
    if found.after.mean() >= found.before.mean():
        console.print(
            "On prompts they were not fitted on, the temperatures help nothing: the head's own "
            "confidences are right already, or there were too few prompts. Better keep it as it is."
        )


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="directory or hub id")
    parser.add_argument("--head", required=True, help="directory of a head with confidences")
    parser.add_argument("--prompts", required=True, help="prompt file, JSON lines")
    parser.add_argument("--out", required=True, type=Path, help="directory of the new head")
    parser.add_argument("--num-prompts", type=int, default=64, help="default 64; 0 takes all")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0, greedy")
    parser.add_argument("--concurrency", type=int, default=8, help="default 8")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args(argv)

    def body() -> int:
        run(args, Console(width=100))
        return 0

    return guarded(body)


if __name__ == "__main__":
    sys.exit(main())
