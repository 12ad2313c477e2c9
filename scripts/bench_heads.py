"""What drafting costs beside a decode step, and DSpark's sequential part beside its backbone.

    python scripts/bench_heads.py --target DIR --head DIR [--head DIR ...] [--batches 1,8]

One round's drafts (all that a head can give, or --drafts of a head without a limit), one decode
step of the target alone, and of a DSpark head the same backbone with its sequential and confidence
parts left out: all in alternation on one state, medians of --repeats. Time for taking in accepted
tokens is not in it; the evaluation's time shares have that.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specjax.cli import guarded

_STEP, _BARE = "decode step", "backbone alone"


def bare(head: Any, params: Any) -> tuple[Any, Any] | None:
    """Return a block head without its sequential and confidence parts, None for other heads."""
    if head.name != "dspark":
        return None
    config = dataclasses.replace(
        head.config, markov_rank=0, confidence=False, confidence_with_markov=False
    )
    plain = dataclasses.replace(head, config=config, temperatures=())
    return plain, dataclasses.replace(params, markov=None, confidence=None)


def runs(
    args: argparse.Namespace, target: Any, params: Any, head: Any, weights: Any, batch: int
) -> dict[str, Callable[[], Any]]:
    """Return what is timed for one head at one batch size, by name."""
    from specjax.decode import Engine, EngineConfig, Request
    from specjax.decode.schedule import run_width
    from specjax.evaluation.playback import filled, propose

    drafts = head.max_tokens or args.drafts
    config = EngineConfig(num_speculative_tokens=drafts, concurrency=batch)
    prompt = [1 + i % (target.info.vocab - 1) for i in range(args.context)]
    requests = [Request(prompt, max_new_tokens=64) for _ in range(batch)]
    capacity = args.context + 128
    engine = Engine(target, params, head, weights, config)
    state = filled(engine, requests, capacity)
    found = {"drafts": lambda: propose(engine.decoder, engine.weights, state)}
    plain = bare(head, weights)
    if plain is not None:
        other = Engine(target, params, *plain, config)
        found[_BARE] = lambda: propose(other.decoder, other.weights, state)
    tokens, valid = jnp.ones((batch, 1), jnp.int32), jnp.ones((batch,), jnp.int32)

    @jax.jit
    def step(params: Any, cache: Any) -> Any:
        out, logits = run_width(target, params, tokens, valid, cache, (), batch)
        return logits, out.update

    found[_STEP] = lambda: step(params, state.cache)
    return found


def measure(found: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return median seconds by name; the programs run in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for run in found.values():
        jax.block_until_ready(run())
    for _ in range(repeats):
        for name, run in found.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def bench(args: argparse.Namespace, console: Console) -> int:
    """Time every head at every batch size and print the table."""
    from specjax import heads, targets

    grid = Table(title=f"a round's drafts, {args.dtype}, context {args.context}", box=None)
    names = ("head", "batch", "step ms", "drafts ms", "of a step", "backbone ms", "rest of drafts")
    for name in names:
        grid.add_column(name, justify="left" if name == "head" else "right")
    target, params = targets.load(args.target, args.dtype)
    for source in args.head:
        head, weights = heads.load(source, target.info, args.dtype)
        what = f"{head.name}, {head.max_tokens or args.drafts} drafts"
        for batch in map(int, args.batches.split(",")):
            found = measure(runs(args, target, params, head, weights, batch), args.repeats)
            drafts, step, alone = found["drafts"], found[_STEP], found.get(_BARE)
            row = [
                what,
                str(batch),
                f"{step * 1e3:.1f}",
                f"{drafts * 1e3:.1f}",
                f"{drafts / step:.2f}",
            ]
            if alone is not None:
                row += [f"{alone * 1e3:.1f}", f"{1 - alone / drafts:.0%}"]
            grid.add_row(*row)
    console.print(grid)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", required=True, action="append")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--drafts", type=int, default=4, help="of heads without a limit")
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args(argv)
    return guarded(lambda: bench(args, Console(width=100)))


if __name__ == "__main__":
    sys.exit(main())
