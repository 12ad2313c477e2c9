"""Layers in order, as runs that repeat: what `layer_loop` unrolls or scans.

A decoder's layers follow a short pattern (5 sliding, 1 full; 3 linear, 1 full; a few dense layers,
then sparse ones). `segments` finds it in the list of layer kinds, whatever the family, so that a
scan compiles each layer of the pattern once. Unrolled is the special case of one segment that is
not repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.core.params import is_spec, map_specs, stack

PyTree = Any
LAYER_LOOPS = ("unroll", "scan")
_LONGEST_PERIOD = 12


@dataclasses.dataclass(frozen=True)
class Segment:
    """Layers `first`, `first + 1`, ...: `period` of them, `repeats` times over.

    Attributes:
        first: index of the first layer.
        period: layers in one turn of the pattern.
        repeats: turns; 1 means that the layers are run one by one.
    """

    first: int
    period: int
    repeats: int

    @property
    def layers(self) -> range:
        """Indices of its layers."""
        return range(self.first, self.first + self.period * self.repeats)

    def turns(self, position: int) -> range:
        """Indices of the layers at `position` of the pattern, one per turn."""
        return range(self.first + position, self.layers.stop, self.period)


@struct.dataclass
class Stacked:
    """A tree whose leaves hold the layers of all turns along a new leading axis."""

    tree: PyTree


def segments(kinds: Sequence[Hashable], layer_loop: str) -> tuple[Segment, ...]:
    """Split layers into runs that repeat.

    Args:
        kinds: one description per layer; equal ones can share a scan.
        layer_loop: "unroll" or "scan".

    Returns:
        Segments in order. Of several patterns at a layer, the one that covers most is taken, and
        of those the shortest.
    """
    if layer_loop not in LAYER_LOOPS:
        raise ValueError(f"layer_loop {layer_loop!r}; have {', '.join(LAYER_LOOPS)}")
    if layer_loop == "unroll":
        return (Segment(0, len(kinds), 1),)
    found, single, at = [], 0, 0
    while at < len(kinds):
        period, repeats = _longest_run(kinds, at)
        if repeats == 1:
            single, at = single + 1, at + 1
            continue
        if single:
            found.append(Segment(at - single, single, 1))
        found.append(Segment(at, period, repeats))
        single, at = 0, at + period * repeats
    if single:
        found.append(Segment(at - single, single, 1))
    return tuple(found)


def _longest_run(kinds: Sequence[Hashable], at: int) -> tuple[int, int]:
    """Return (period, repeats) of the pattern that covers most layers from `at` on."""
    best = (1, 1)
    for period in range(1, min(_LONGEST_PERIOD, (len(kinds) - at) // 2) + 1):
        repeats = 1
        while list(kinds[at : at + period]) == list(
            kinds[at + repeats * period : at + (repeats + 1) * period]
        ):
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def stack_specs(trees: Sequence[PyTree]) -> PyTree:
    """Stack the weight tables of equal layers along a leading "layers" axis."""
    return map_specs(lambda *specs: stack(specs, "layers"), *trees)


def group(layers: Sequence[PyTree], parts: Sequence[Segment]) -> tuple[PyTree, ...]:
    """Arrange one tree per layer as the segments want them: stacked where they repeat.

    Trees of ParamSpec and of arrays are stacked alike; None stays None.
    """

    def join(trees: Sequence[PyTree]) -> PyTree:
        if trees[0] is None:
            return None
        if any(is_spec(leaf) for leaf in jax.tree.leaves(trees[0], is_leaf=is_spec)):
            return Stacked(stack_specs(trees))
        return Stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees))

    grouped: list[PyTree] = []
    for part in parts:
        for position in range(part.period):
            trees = [layers[i] for i in part.turns(position)]
            grouped.append(trees[0] if part.repeats == 1 else join(trees))
    return tuple(grouped)


def ungroup(grouped: Sequence[PyTree], parts: Sequence[Segment]) -> tuple[PyTree, ...]:
    """Return one tree per layer again."""
    layers: dict[int, PyTree] = {}
    entries = iter(grouped)
    for part in parts:
        for position in range(part.period):
            entry = next(entries)
            for turn, i in enumerate(part.turns(position)):
                layers[i] = (
                    jax.tree.map(lambda leaf, t=turn: leaf[t], entry.tree)
                    if isinstance(entry, Stacked)
                    else entry
                )
    return tuple(layers[i] for i in sorted(layers))


def pick(grouped: Sequence[PyTree], parts: Sequence[Segment], layer: int) -> PyTree:
    """Return the tree of one layer."""
    before = 0
    for part in parts:
        if layer in part.layers:
            turn, position = divmod(layer - part.first, part.period)
            entry = grouped[before + position]
            if isinstance(entry, Stacked):
                return jax.tree.map(lambda leaf, t=turn: leaf[t], entry.tree)
            return entry
        before += part.period
    raise IndexError(f"no layer {layer}")


def map_entries(function: Callable[..., PyTree], *entries: PyTree) -> PyTree:
    """Apply a function of one layer's trees to an entry, turn by turn where it is stacked."""
    if isinstance(entries[0], Stacked):
        return Stacked(jax.vmap(function)(*(entry.tree for entry in entries)))
    return function(*entries)
