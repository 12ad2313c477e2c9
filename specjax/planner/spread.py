"""How arrays lie over the devices of a mesh, followed forward through a program.

Weights and caches are laid by the engine's own table; what is computed from them lies as its parts
do. A product whose summed dimension is split leaves *partial* sums, which become whole (an
all-reduce) at the first operation that is not linear. A weight picked from a table that is split
along what is picked (an expert) lies *elsewhere*: on one of the devices, on another for the next
pick; it and what is made of it is taken to be shared out evenly, and becomes whole where it is
added to what everybody has. This is what the partitioner makes of our programs; the rules for
other programs would be more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.planner.program import Op

Axes = frozenset[str]
NONE: Axes = frozenset()


@dataclasses.dataclass(frozen=True)
class Spread:
    """How one array lies.

    Attributes:
        dims: mesh axes that split each dimension.
        partial: axes over which it is still to be summed.
        elsewhere: axes of which one device has it.
        itemsize: bytes per element of the partial sums.
    """

    dims: tuple[Axes, ...]
    partial: Axes = NONE
    elsewhere: Axes = NONE
    itemsize: int = 4

    @property
    def axes(self) -> Axes:
        """All axes that share it out."""
        return self.elsewhere.union(*self.dims)


def whole(rank: int) -> Spread:
    """Return what every device has all of."""
    return Spread((NONE,) * rank)


def ways(mesh: Mapping[str, int], axes: Axes) -> int:
    """Return over how many devices axes share something out."""
    return math.prod(mesh[axis] for axis in axes)


# Sums may wait behind these.
_LINEAR = {
    "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "copy",
    "gather", "dynamic_slice", "reduce_sum", "neg", "select_n", "pad", "concatenate",
    "expand_dims", "bitcast_convert_type", "stop_gradient", "rev", "split", "stack",
    "optimization_barrier", "scan", "cond",
}  # fmt: skip


def to_be_whole(op: Op, ins: Sequence[Spread], plain: Sequence[bool]) -> list[tuple[int, Axes]]:
    """Return (input, axes) that must be made whole before an operation.

    Args:
        op: the operation.
        ins: how its inputs lie.
        plain: which of them are activations, that is, no weights and no constants.
    """
    if op.name == "scan":  # turn after turn would have it to sum
        return [(i, owed) for i in op.carried if (owed := ins[i].partial | ins[i].elsewhere)]
    pending = [i for i, spread in enumerate(ins) if spread.partial]
    adds = op.name in ("add", "sub", "add_any")
    alike = adds and all(spread.partial == ins[0].partial for spread in ins)
    scales = op.name in ("mul", "div") and pending in ([0], [1])
    if alike or scales or op.name in _LINEAR:
        pending = []
    found = [(i, ins[i].partial) for i in pending]
    if adds and plain[0] and plain[1]:
        common = ins[0].elsewhere & ins[1].elsewhere
        found += [(i, owed) for i in (0, 1) if (owed := ins[i].elsewhere - common)]
    return found


def result(op: Op, ins: Sequence[Spread]) -> tuple[list[Spread], Axes]:
    """Return (how an operation's outputs lie, axes over which it needs more than its own part).

    Loops and branches are not for this function.
    """
    partial = NONE.union(*(spread.partial for spread in ins))
    elsewhere = NONE.union(*(spread.elsewhere for spread in ins))
    itemsize = max((spread.itemsize for spread in ins if spread.partial), default=4)
    dims, summed, asked = _dims(op, ins)
    new = elsewhere
    if op.name in ("gather", "dynamic_slice"):
        picked = _picked(op, ins[0])
        if len(op.ins[0].shape) - len(_indexed(op)) >= 2:  # a matrix is used where it lies
            new |= picked
        elif picked:
            partial, itemsize = partial | picked, op.outs[0].dtype.itemsize
    if summed:
        partial, itemsize = partial | summed, op.outs[0].dtype.itemsize
    used = new | partial
    outs = [
        Spread(tuple(axes - used for axes in _fit(dims, out.shape)), partial, new, itemsize)
        for out in op.outs
    ]
    return outs, asked


def _fit(dims: Sequence[Axes], shape: Sequence[int]) -> tuple[Axes, ...]:
    return tuple(dims) if len(dims) == len(shape) else (NONE,) * len(shape)


def _dims(op: Op, ins: Sequence[Spread]) -> tuple[Sequence[Axes], Axes, Axes]:
    """Return (axes of each dimension of the result, those summed over, those asked of others)."""
    name, p = op.name, op.params
    shape = op.outs[0].shape
    first = ins[0].dims if ins else ()
    if name == "dot_general":
        return _product(p["dimension_numbers"], ins)
    if name == "broadcast_in_dim":
        dims = [NONE] * len(shape)
        for axes, at, size in zip(first, p["broadcast_dimensions"], op.ins[0].shape, strict=True):
            dims[at] = axes if size == shape[at] else NONE
        return dims, NONE, NONE
    if name == "reshape":
        return reshaped(first, op.ins[0].shape, shape), NONE, NONE
    if name == "transpose":
        return [first[i] for i in p["permutation"]], NONE, NONE
    if name == "squeeze":
        gone = {d % len(first) for d in p["dimensions"]}
        return [axes for i, axes in enumerate(first) if i not in gone], NONE, NONE
    if name == "stack":
        return [*first[: p["axis"]], NONE, *first[p["axis"] :]], NONE, NONE
    if name.startswith("reduce_") or name in ("argmax", "argmin"):
        gone = {d % len(first) for d in p["axes"]}
        over = NONE.union(*(first[d] for d in gone))
        dims = [axes for i, axes in enumerate(first) if i not in gone]
        return (dims, over, NONE) if name == "reduce_sum" else (dims, NONE, over)
    if name in ("sort", "top_k", "cumsum", "cumprod", "cummax", "cumlogsumexp"):
        at = p.get("dimension", p.get("axis", -1)) % len(first)
        return [NONE if i == at else axes for i, axes in enumerate(first)], NONE, first[at]
    if name == "gather":
        return _gathered(op, ins), NONE, NONE
    if name == "dynamic_slice":
        sizes = zip(first, op.ins[0].shape, shape, strict=True)
        return [axes if size == left else NONE for axes, size, left in sizes], NONE, NONE
    if name.startswith("scatter") or name == "dynamic_update_slice":
        return first, NONE, NONE
    if name == "concatenate":
        dims = list(_merged([spread.dims for spread in ins]))
        dims[p["dimension"]] = NONE
        return dims, NONE, NONE
    alike = [s.dims for s, v in zip(ins, op.ins, strict=True) if _broadcasts(v.shape, shape)]
    if alike:
        return _merged(alike), NONE, NONE
    if name in ("slice", "pad", "split") and ins:
        return first, NONE, NONE
    return (NONE,) * len(shape), NONE, NONE


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) == len(to) > 0 and all(a in (b, 1) for a, b in zip(shape, to, strict=True))


def _merged(parts: Sequence[Sequence[Axes]]) -> tuple[Axes, ...]:
    """Return the split of what lies as any of its parts; an axis splits one dimension."""
    taken: Axes = NONE
    dims = []
    for each in zip(*parts, strict=True):
        axes = functools.reduce(lambda a, b: a or b, each) - taken
        taken |= axes
        dims.append(axes)
    return tuple(dims)


def _product(numbers: Any, ins: Sequence[Spread]) -> tuple[Sequence[Axes], Axes, Axes]:
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    left, right = ins[0].dims, ins[1].dims
    summed = NONE.union(*(left[i] for i in left_sum), *(right[i] for i in right_sum))
    batch = [left[i] | right[j] for i, j in zip(left_batch, right_batch, strict=True)]
    free = [left[i] for i in range(len(left)) if i not in (*left_sum, *left_batch)]
    more = [right[i] for i in range(len(right)) if i not in (*right_sum, *right_batch)]
    dims = [axes - summed for axes in (*batch, *free, *more)]
    taken: Axes = NONE
    for i, axes in enumerate(dims):
        dims[i] = axes - taken
        taken |= axes
    return dims, summed, NONE


def reshaped(dims: Sequence[Axes], old: Sequence[int], new: Sequence[int]) -> list[Axes]:
    """Return the split behind a reshape: the outermost of dimensions that belong together has it.

    Args:
        dims: axes of each dimension before.
        old: the shape before.
        new: the shape behind.
    """
    out = [NONE] * len(new)
    if 0 in old or not any(dims):
        return out
    i = j = 0
    while i < len(old) and j < len(new):
        first, begin = i, j
        before, behind = old[i], new[j]
        while before != behind:
            if before < behind:
                i += 1
                before *= old[i]
            else:
                j += 1
                behind *= new[j]
        axes = NONE.union(*dims[first : i + 1])
        widest = next((k for k in range(begin, j + 1) if new[k] > 1), begin)
        out[widest] = axes
        i, j = i + 1, j + 1
    return out


def _indexed(op: Op) -> tuple[int, ...]:
    """Return the dimensions of a table that are picked from."""
    table, sizes = op.ins[0].shape, op.params["slice_sizes"]
    among = range(len(table))
    if op.name == "gather":
        among = op.params["dimension_numbers"].start_index_map
    return tuple(d for d in among if sizes[d] < table[d])


def _picked(op: Op, table: Spread) -> Axes:
    return NONE.union(*(table.dims[d] for d in _indexed(op)))


def _gathered(op: Op, ins: Sequence[Spread]) -> list[Axes]:
    """Return the split of a gather: batch dimensions lie as the indices, the others as the table"""
    numbers, table, indices = op.params["dimension_numbers"], ins[0].dims, list(ins[1].dims[:-1])
    batching = getattr(numbers, "operand_batching_dims", ())
    for at, d in zip(getattr(numbers, "start_indices_batching_dims", ()), batching, strict=True):
        indices[at] = indices[at] | table[d]
    kept = [d for d in range(len(table)) if d not in (*numbers.collapsed_slice_dims, *batching)]
    sizes, whole_dims = op.params["slice_sizes"], op.ins[0].shape
    offsets = iter(table[d] if sizes[d] == whole_dims[d] else NONE for d in kept)
    rows = iter(indices)
    rank = len(op.outs[0].shape)
    return [next(offsets if d in numbers.offset_dims else rows) for d in range(rank)]


def picks(op: Op) -> int:
    """Return along how many dimensions a `gather` or `dynamic_slice` picks."""
    return len(_indexed(op))
