"""What a verify pass costs when only some drafts are admitted, their products packed together.

    python scripts/bench_schedule.py [--target DIR] [--dtype float32] [--batches 1,8,32]

Without a target directory it takes random weights of SmolLM2-135M's shapes, which cost the same.
Every width is timed in alternation with the others, medians of several rounds; the last width is
the plain pass over batch x (drafts + 1) tokens, which the ratios are against.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specjax import targets
from specjax.core.params import init_params
from specjax.decode.schedule import choose_widths, run_width
from specjax.targets import catalog


def measure(
    target: targets.Target, params: object, batch: int, drafts: int, capacity: int, repeats: int
) -> list[tuple[int, float]]:
    """Return (tokens, median seconds) of each width."""
    cache = target.init_cache(batch, capacity, "float32")
    cache = cache.replace(lengths=jnp.full((batch,), capacity // 2, jnp.int32))
    inputs = jnp.ones((batch, drafts + 1), jnp.int32)
    runs = {}
    for size in choose_widths(batch, drafts):
        valid = jnp.asarray([size // batch + (b < size % batch) for b in range(batch)], jnp.int32)

        @jax.jit
        def run(params: object, valid: jax.Array, cache: object, size: int = size) -> object:
            out, logits = run_width(target, params, inputs, valid, cache, (), size)
            return logits, out.update

        jax.block_until_ready(run(params, valid, cache))
        runs[size] = (run, valid)
    seconds: dict[int, list[float]] = {size: [] for size in runs}
    for _ in range(repeats):
        for size, (run, valid) in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(params, valid, cache))
            seconds[size].append(time.perf_counter() - start)
    return [(size, statistics.median(times)) for size, times in seconds.items()]


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--capacity", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args(argv)
    if args.target:
        target, params = targets.load(args.target, args.dtype)
    else:
        target = catalog.read("SmolLM2-135M-Instruct").build()
        params = init_params(target.specs(), jax.random.key(0), args.dtype)
    grid = Table(title=f"verify pass, {args.dtype}, {args.drafts} drafts a lane", box=None)
    for name in ("batch", "tokens", "ms", "of the full pass"):
        grid.add_column(name, justify="right")
    for batch in map(int, args.batches.split(",")):
        rows = measure(target, params, batch, args.drafts, args.capacity, args.repeats)
        full = rows[-1][1]
        for size, seconds in rows:
            grid.add_row(str(batch), str(size), f"{seconds * 1e3:.1f}", f"{seconds / full:.2f}")
    Console(width=100).print(grid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
