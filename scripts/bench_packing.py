"""What do packed rows save: pads, and seconds of the target's forward pass?

    python scripts/bench_packing.py --target TARGET_DIR --data answers.jsonl

The same rows in batches by length (four lengths up to --max-length) and in packed ones (rows of
--packed positions), as many positions at most in each. The forms run in turn, a batch each, every
shape compiled before it is timed; tokens per second are all timed tokens, pads not counted, over
all seconds.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import targets
from specjax.cli import guarded
from specjax.data.chat import ChatEncoder
from specjax.data.conversations import load_chats
from specjax.data.dataset import Batches, Position
from specjax.data.packing import PackedBatches
from specjax.io.hf import resolve
from specjax.training.config import DataConfig
from specjax.training.step import features


@dataclasses.dataclass(frozen=True)
class Reader:
    """Stands for a head: the residual streams that it wants."""

    taps: tuple[int, ...]
    reads: tuple[int, ...] = ()


def measure(
    target: Any, params: Any, forms: dict[str, Batches], count: int
) -> dict[str, tuple[int, float]]:
    """Return (tokens, seconds) of the first `count` batches of every form."""
    layers = target.info.num_layers
    head = Reader((2, layers // 2, layers - 3))
    run = jax.jit(lambda params, batch: features(target, params, head, batch, jax.random.key(0)))
    compiled: set[Any] = set()
    found = {name: (0, 0.0) for name in forms}
    for step in range(count):
        for name, batches in forms.items():
            batch = batches.batch(Position(0, step % batches.steps_per_epoch))
            if (shape := (name, batch["input_ids"].shape)) not in compiled:
                jax.block_until_ready(run(params, batch))
                compiled.add(shape)
            start = time.perf_counter()
            jax.block_until_ready(run(params, batch))
            seconds = time.perf_counter() - start
            tokens, before = found[name]
            found[name] = (tokens + int(np.sum(batch["lengths"])), before + seconds)
    return found


def body(args: argparse.Namespace) -> int:
    """Measure and print the table."""
    from transformers import AutoTokenizer

    target, params = targets.load(args.target, args.dtype)
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(resolve(args.target)), target.info.stop_ids)
    rows, _ = load_chats([args.data], encoder, args.max_length)
    lengths = DataConfig(max_length=args.max_length).buckets()
    forms: dict[str, Batches] = {"by length": Batches(rows, args.batch_size, lengths)}
    for room in args.packed:
        size = max(args.batch_size * args.max_length // room, 1)
        forms[f"packed to {room}"] = PackedBatches(rows, size, room)
    found = measure(target, params, forms, args.batches)
    table = Table(box=None, pad_edge=False)
    for name in ("form", "rows", "batches an epoch", "pads", "tokens/s"):
        table.add_column(name, justify="left" if name == "form" else "right")
    for name, batches in forms.items():
        tokens, seconds = found[name]
        share, speed = f"{100 * batches.padding:.1f} %", f"{tokens / seconds:.0f}"
        table.add_row(name, str(batches.batch_size), str(batches.steps_per_epoch), share, speed)
    console = Console(width=100)
    console.print(f"python scripts/bench_packing.py {shlex.join(sys.argv[1:])}", style="dim")
    console.print(f"{len(rows)} rows of {np.mean([len(row.ids) for row in rows]):.0f} tokens")
    console.print(table)
    return 0


def main() -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="directory or hub id of the target")
    parser.add_argument("--data", required=True, help="conversations")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--packed", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--batch-size", type=int, default=4, help="rows of the batches by length")
    parser.add_argument("--batches", type=int, default=8, help="batches timed of each form")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    return guarded(lambda: body(args))


if __name__ == "__main__":
    sys.exit(main())
