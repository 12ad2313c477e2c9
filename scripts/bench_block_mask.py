"""DFlash's blocks in training: each with its context, or one dense attention over everything.

    python scripts/bench_block_mask.py [--length 2048] [--anchors 512] [--block 7]

A text of S tokens and N blocks of b slots. Dense: queries S + N b against as many keys, under a
mask of [S + N b]^2 (what a framework without a sparse mask does). Ours (`dflash.block_pass`): the
slots' queries alone, each block against the S keys of the text and its own b, the text's keys
shared and not copied, block by block when scores would grow. Both with gradients of queries, keys
and values, float32, one layer; outputs are compared first at a small size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.heads.dflash.block_pass import Seen, attend_blocks

HEADS, DIM = 4, 64


def data(length: int, anchors: int, block: int) -> dict[str, jax.Array]:
    """Return random queries, keys and values of a text and its blocks."""
    rng = np.random.default_rng(0)

    def side(count: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(1, HEADS, count, DIM)), jnp.float32)

    at = np.sort(rng.choice(length, anchors, replace=anchors > length))
    slots = anchors * block
    return {
        "q": side(slots),
        "context_k": side(length),
        "context_v": side(length),
        "own_k": side(slots),
        "own_v": side(slots),
        "anchors": jnp.asarray(at[None], jnp.int32),
    }


def blocks(given: dict[str, jax.Array]) -> jax.Array:
    """Attend as training does; `[1, N b, heads * dim]`."""
    anchors = given["anchors"]
    size = given["q"].shape[2] // anchors.shape[1]
    at = jnp.arange(given["context_k"].shape[2])
    seen = Seen(
        (given["context_k"], given["context_v"]),
        (given["own_k"], given["own_v"]),
        anchors,
        lambda anchor: at[None, None] < anchor[:, None, None],
        jnp.ones((size, size), bool),
    )
    return attend_blocks(given["q"], [seen], DIM**-0.5)


def dense(given: dict[str, jax.Array]) -> jax.Array:
    """Attend over text and blocks at once, the mask built whole; `[1, N b, heads * dim]`."""
    anchors, length = given["anchors"][0], given["context_k"].shape[2]
    slots = given["q"].shape[2]
    size = slots // anchors.shape[0]
    # The text's own queries run through the same product, as in a joint pass.
    q = jnp.concatenate([given["context_k"], given["q"]], axis=2)
    k = jnp.concatenate([given["context_k"], given["own_k"]], axis=2)
    v = jnp.concatenate([given["context_v"], given["own_v"]], axis=2)
    at, own = jnp.arange(length + slots), jnp.arange(length + slots) >= length
    home = jnp.where(own, (at - length) // size, -1)
    anchor = jnp.where(own, anchors[home], at + 1)
    mask = jnp.where(own[None], home[:, None] == home[None], at[None] < anchor[:, None])
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * DIM**-0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bhqk,bhkd->bhqd", weights, v)[:, :, length:]
    return jnp.moveaxis(out, 1, 2).reshape(1, slots, HEADS * DIM)


def gradients(attention: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Return value and gradients of a sum of squares."""

    def loss(sides: dict[str, jax.Array], anchors: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(attention({**sides, "anchors": anchors})))

    return jax.jit(jax.value_and_grad(loss))


def agree() -> float:
    """Return the largest difference of gradients at a small size, relative to the largest."""
    given = data(64, 12, 4)
    anchors = given.pop("anchors")
    (_, ours), (_, theirs) = (gradients(f)(given, anchors) for f in (blocks, dense))
    return max(
        float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    given = data(args.length, args.anchors, args.block)
    anchors = given.pop("anchors")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (given, anchors))
    table = Table(
        title=f"S {args.length}, {args.anchors} blocks of {args.block}, {HEADS} heads of {DIM}",
        box=None,
    )
    for name in ("attention", "temporaries MiB", "median s", "ratio"):
        table.add_column(name, justify="left" if name == "attention" else "right")
    programs = {"blocks": gradients(blocks), "dense": gradients(dense)}
    memory, spent = {}, {name: [] for name in programs}
    for name, program in programs.items():
        found = program.lower(*shapes).compile().memory_analysis()
        memory[name] = found.temp_size_in_bytes / (1 << 20)
    for turn in range(args.repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(given, anchors))
            if turn:
                spent[name].append(time.perf_counter() - start)
    ratio = statistics.median(d / b for d, b in zip(spent["dense"], spent["blocks"], strict=True))
    for name in programs:
        row = (f"{memory[name]:.0f}", f"{statistics.median(spent[name]):.2f}")
        table.add_row(name, *row, f"{ratio:.1f}" if name == "dense" else "1")
    console = Console(width=100)
    console.print(f"largest difference of gradients at a small size: {agree():.1e}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
