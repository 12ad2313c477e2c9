"""What do experts cost, by method and number of tokens?

    python scripts/bench_moe.py [--experts 32 --top-k 4 --hidden 512 --width 256]

One sparse feed-forward with random routing, each method of `specjax.layers.moe` and, for
comparison, every expert for every token as one batched product. Medians of calls in alternation;
in brackets the ratio to that product. The constants of `specjax.layers.moe` come from here.
"""

import argparse
import functools
import itertools
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.core.params import init_params
from specjax.layers import moe
from specjax.layers.linear import linear_f32

METHODS: Mapping[str, Callable[..., jax.Array]] = {
    "gathered": moe.gathered,
    "sorted": moe.sorted_blocks,
    "ragged": moe.ragged,
}
Arrays = tuple[moe.ExpertWeights, jax.Array, jax.Array, jax.Array]


def dense(
    weights: moe.ExpertWeights,
    x: jax.Array,
    ids: jax.Array,
    probs: jax.Array,
    activation: moe.Activation,
) -> jax.Array:
    """Run every expert for every token as one batched product."""

    def one(w: moe.ExpertWeights) -> jax.Array:
        gate, up = linear_f32(x, w.gate), linear_f32(x, w.up)
        return linear_f32((activation(gate) * up).astype(x.dtype), w.down)

    share = (jax.nn.one_hot(ids, weights.gate.shape[0]) * probs[..., None]).sum(1)
    return jnp.einsum("enh,ne->nh", jax.vmap(one)(weights), share)


def tokens(count: int, args: argparse.Namespace) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw (x, ids, probs) of `count` tokens that choose their experts evenly at random."""
    rng = np.random.default_rng(count)
    ids = np.stack([rng.permutation(args.experts)[: args.top_k] for _ in range(count)])
    return (
        jnp.asarray(rng.normal(size=(count, args.hidden)), args.dtype),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(rng.dirichlet(np.ones(args.top_k), count), jnp.float32),
    )


def measure(
    runs: Mapping[str, Callable[..., jax.Array]], arrays: Arrays, repeats: int, limit: float
) -> dict[str, float | None]:
    """Return median seconds per method; None where one call takes longer than `limit`."""
    compiled = {
        name: jax.jit(functools.partial(run, activation=jax.nn.silu)) for name, run in runs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in compiled}

    def call(name: str) -> float:
        start = time.perf_counter()
        compiled[name](*arrays).block_until_ready()
        return time.perf_counter() - start

    for name in compiled:
        call(name)  # compiles
    slow = {name for name in compiled if call(name) > limit}
    for repeat in range(repeats):
        for name in list(compiled)[:: 1 if repeat % 2 == 0 else -1]:
            if name not in slow:
                seconds[name].append(call(name))
    return {name: statistics.median(v) if v else None for name, v in seconds.items()}


def cell(spent: float | None, whole: float | None) -> str:
    """Format milliseconds and the ratio to the dense product."""
    if spent is None:
        return "too slow"
    ratio = "" if whole is None else f" ({spent / whole:.2f})"
    return f"{spent * 1e3:.2f}{ratio}"


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=256, help="of an expert")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="block lengths to try")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--limit", type=float, default=0.25, help="seconds a call may take")
    args = parser.parse_args(argv)
    if not 1 <= args.top_k <= args.experts:
        parser.error("--top-k must lie between 1 and --experts")
    if min(*args.tokens, *args.rows, args.repeats, args.hidden, args.width) < 1:
        parser.error("sizes and --repeats must be at least 1")

    specs = moe.ExpertWeights.abstract(args.experts, args.width, args.hidden, "")
    weights = init_params(specs, jax.random.key(0), args.dtype)
    runs = {name: METHODS[name] for name in args.methods}
    runs |= {f"rows {m}": functools.partial(moe.sorted_blocks, rows=m) for m in args.rows}
    console = Console(width=100)
    table = Table(
        title=f"{args.experts} experts, {args.top_k} per token, {args.hidden} x {args.width}, "
        f"{args.dtype}: ms (of dense)"
    )
    for column in ("tokens", "experts used", *runs, "dense"):
        table.add_column(column, justify="right")
    wins: dict[int, str] = {}
    for count in args.tokens:
        arrays = (weights, *tokens(count, args))
        spent = measure({**runs, "dense": dense}, arrays, args.repeats, args.limit)
        whole = spent.pop("dense")
        known = {name: seconds for name, seconds in spent.items() if seconds is not None}
        wins[count] = min(known, key=known.__getitem__, default="none")
        used = len(np.unique(np.asarray(arrays[2])))
        cells = [cell(seconds, whole) for seconds in spent.values()]
        table.add_row(str(count), str(used), *cells, cell(whole, None))
    console.print(table)
    ahead = itertools.takewhile(lambda count: wins[count] == "gathered", sorted(wins))
    pairs = max(ahead, default=0) * args.top_k
    console.print(
        f"crossover: gathered is fastest up to {pairs} pairs of token and expert; fastest at "
        + ", ".join(f"{count}: {name}" for count, name in wins.items())
    )
    console.print(
        f"{jax.default_backend()}, {os.cpu_count()} cores, jax {jax.__version__}, "
        f"{args.repeats} repeats. Command:"
    )
    words = sys.argv[1:] if argv is None else argv
    console.print(shlex.join(["python", "scripts/bench_moe.py", *words]), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
