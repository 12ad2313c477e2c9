"""Training steps with features online and from caches, in alternation.

    python scripts/bench_features.py --kind eagle3 --target DIR --data answers.jsonl \
        --draft_vocab FILE --caches features_bf16,features_fp8 [--steps 16]

The caches are written beforehand by scripts/cache_features.py with the same target, data and
recipe (configs/train/KIND_smollm2.gin). Nothing is saved; every run sees the same batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the training scripts

from specjax.cli import guarded

_CONFIGURABLES = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DFlash"}


def bench(args: argparse.Namespace, console: Console) -> None:
    """Time the steps and print the table.

    Raises:
        SpecJaxError: a target, data or cache that cannot be used.
    """
    from specjax import targets
    from specjax.config import parse
    from specjax.heads.base import borrow
    from specjax.training import rows
    from specjax.training.features.batches import from_cache
    from specjax.training.run import read_kept
    from specjax.training.trainer import Trainer

    name = _CONFIGURABLES[args.kind]
    words = [f"--gin_file=train/{args.kind}_smollm2.gin", f"Trainer.target={args.target}"]
    words += [f"Data.files={args.data}", "Data.holdout=0", f"{name}.draft_vocab={args.draft_vocab}"]
    with tempfile.TemporaryDirectory() as out:
        config = parse([*words, f"Trainer.out={out}", "Trainer.epochs=1000"])
        run, settings = config.build("Trainer"), config.build(name)
        target, params = targets.load(run.target, run.target_dtype)
        script: Any = importlib.import_module(f"train.{args.kind}")
        kept = read_kept(settings.draft_vocab)
        key = jax.random.key(0)
        head, weights = script.make(target, settings, borrow(target, params), key, kept)
        data = rows.load(run, target.info.stop_ids)
        runs: dict[str, tuple[Any, Any]] = {}
        for cache in ("", *args.caches.split(",")):
            own = dataclasses.replace(run, features=cache)
            batches = from_cache(data, own, target.info, head).train if cache else data.train
            trainer = Trainer(own, target, params, head, weights, batches)
            runs[cache or "online"] = trainer, batches.iterate(trainer.position)
        spent: dict[str, list[float]] = {name: [] for name in runs}
        losses: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.steps):
            for name, (trainer, stream) in runs.items():
                batch, _ = next(stream)
                begin = time.perf_counter()
                trainer.state, _, metrics = trainer.steps.train(
                    trainer.state, None, trainer.fixed, trainer.placement.batch(batch),
                    jnp.int32(0), last=True,
                )  # fmt: skip
                losses[name].append(float(metrics["loss"]))
                seconds = time.perf_counter() - begin
                spent[name].append(seconds / int(batch["lengths"].sum()))
    table = Table(title=f"{args.kind}, {args.steps} steps each, in alternation", box=None)
    for column in ("features", "tokens/s", "against online", "first loss", "last loss"):
        table.add_column(column, justify="left" if column == "features" else "right")
    for name, each in spent.items():
        # The first steps of each shape compile.
        pairs = list(zip(spent["online"], each, strict=True))[args.warmup :]
        ratio = statistics.median(a / b for a, b in pairs)
        rate = 1 / statistics.median(b for _, b in pairs)
        first, last = losses[name][0], losses[name][-1]
        table.add_row(name, f"{rate:.0f}", f"{ratio:.2f}", f"{first:.4f}", f"{last:.4f}")
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=list(_CONFIGURABLES), default="eagle3")
    parser.add_argument("--target", required=True, help="directory or hub id")
    parser.add_argument("--data", required=True, help="the sources that the caches are of")
    parser.add_argument("--draft_vocab", required=True, help="of scripts/draft_vocab.py")
    parser.add_argument("--caches", required=True, help="folders, with commas between")
    parser.add_argument("--steps", type=int, default=24, help="of each (default 24)")
    parser.add_argument("--warmup", type=int, default=8, help="not counted (default 8)")
    args = parser.parse_args(argv)

    def body() -> int:
        bench(args, Console(width=100))
        return 0

    return guarded(body)


if __name__ == "__main__":
    sys.exit(main())
