"""Running a decoder's layers: one by one, or scanned over their repeating pattern.

Both forms call the same layer functions. The scan compiles each layer of the pattern once, which
deep and packed models need; on a CPU it copies each layer's weights before the products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.core.stack import Segment, Stacked
from specjax.layers.context import Context
from specjax.layers.layer_kind import LayerKind

PyTree = Any


def run_layers(
    kinds: Sequence[LayerKind],
    parts: Sequence[Segment],
    layers: tuple[PyTree, ...],
    entries: tuple[PyTree, ...],
    x: jax.Array,
    ctx: Context,
    taps: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, tuple[PyTree, ...]]:
    """Run all layers over the residual stream.

    Args:
        kinds: one description per layer.
        parts: the layers as runs that repeat.
        layers: weights as `core.stack.group` arranges them.
        entries: cache entries, arranged alike; None without a cache.
        x: `[B, T, H]` the embeddings.
        ctx: what the layers share.
        taps: residual streams to keep, 0 to L.

    Returns:
        (`[B, T, H]` the last stream, `[n, B, T, H]` the tapped ones, the update, arranged alike).
    """
    loop = _Loop(kinds, taps, {0: x}, ctx)
    update: list[PyTree] = []
    for part in parts:
        ours = slice(len(update), len(update) + part.period)
        run = loop.scan if part.repeats > 1 else loop.unroll
        x, new = run(part, layers[ours], entries[ours], x)
        update += new
    streams = [loop.kept[tap] for tap in taps]
    kept = jnp.stack(streams) if streams else jnp.zeros((0, *x.shape), x.dtype)
    return x, kept, tuple(update)


@dataclasses.dataclass
class _Loop:
    """The loop while it is traced: which streams were kept, and what later layers share."""

    kinds: Sequence[LayerKind]
    taps: tuple[int, ...]
    kept: dict[int, jax.Array]
    ctx: Context

    def unroll(
        self, part: Segment, layers: Sequence[PyTree], entries: Sequence[PyTree], x: jax.Array
    ) -> tuple[jax.Array, list[PyTree]]:
        update = []
        for i, weights, entry in zip(part.layers, layers, entries, strict=True):
            with jax.named_scope(f"layer{i}"):
                x, new = self.kinds[i].run(weights, x, self.ctx, entry, i)
            update.append(new)
            if i + 1 in self.taps:
                self.kept[i + 1] = x
            self._share(i, entry, new)
        return x, update

    def scan(
        self, part: Segment, layers: Sequence[PyTree], entries: Sequence[PyTree], x: jax.Array
    ) -> tuple[jax.Array, list[PyTree]]:
        """Scan over the turns of a pattern; weights and cache entries are only read.

        A tapped stream is put into its place of a small buffer, so that streams nobody asked for
        are not kept.
        """
        wanted = tuple(tap for tap in dict.fromkeys(self.taps) if tap - 1 in part.layers)

        def turn(carry: tuple[jax.Array, jax.Array], xs: Any) -> Any:
            (x, streams), (number, weights, rows) = carry, xs
            weights = _put_back(weights, whole, number)
            update = []
            for position in range(part.period):
                index = part.first + position + number * part.period
                kind = self.kinds[part.first + position]
                with jax.named_scope(f"position{position}"):
                    x, new = kind.run(weights[position], x, self.ctx, rows[position], index)
                update.append(new)
                for slot, tap in enumerate(wanted):
                    if tap - 1 in part.turns(position):
                        kept = jnp.where(index + 1 == tap, x, streams[slot])
                        streams = streams.at[slot].set(kept)
            return (x, streams), tuple(update)

        def plain(trees: Sequence[PyTree]) -> tuple[PyTree, ...]:
            return tuple(t.tree if isinstance(t, Stacked) else None for t in trees)

        sliced, whole = _set_apart(plain(layers))

        streams = jnp.zeros((len(wanted), *x.shape), x.dtype)
        rows = plain(entries)
        xs = (jnp.arange(part.repeats), sliced, rows)
        (x, streams), update = jax.lax.scan(turn, (x, streams), xs)
        self.kept |= dict(zip(wanted, streams, strict=True))
        for position in range(part.period):
            last = jax.tree.map(lambda leaf: leaf[-1], (rows[position], update[position]))
            self._share(part.turns(position)[-1], *last)
        return x, [None if new is None else Stacked(new) for new in update]

    def _share(self, i: int, entry: PyTree, new: PyTree) -> None:
        """Keep what layer i has for the layers that read it."""
        kind, later = self.kinds[i], self.kinds[i + 1 :]
        if kind.cache is not None and any(k.cache is None and k.label == kind.label for k in later):
            self.ctx = dataclasses.replace(
                self.ctx, shared={**self.ctx.shared, kind.label: (entry, new)}
            )


@struct.dataclass
class _Elsewhere:
    """Stands in scanned weights for a record that selects its layer itself."""


def _is_whole(node: PyTree) -> bool:
    return hasattr(node, "at_layer")


def _set_apart(trees: PyTree) -> tuple[PyTree, list[PyTree]]:
    """Split weights into those to scan over and those that select their layer themselves."""
    nodes, structure = jax.tree.flatten(trees, is_leaf=_is_whole)
    scanned = [_Elsewhere() if _is_whole(node) else node for node in nodes]
    return jax.tree.unflatten(structure, scanned), [node for node in nodes if _is_whole(node)]


def _put_back(sliced: PyTree, whole: Sequence[PyTree], number: jax.Array) -> PyTree:
    """Return the weights of one turn; those set apart are told which turn it is."""
    rest = iter(whole)
    return jax.tree.map(
        lambda node: next(rest).at_layer(number) if isinstance(node, _Elsewhere) else node,
        sliced,
        is_leaf=lambda node: isinstance(node, _Elsewhere),
    )
