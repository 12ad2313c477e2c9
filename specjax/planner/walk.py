"""What a program costs: products, memory moved, data sent, walked over its operations.

The compiler's own analysis counts the body of a loop once and a table of experts whole. Here a
loop counts as often as it turns, a table as far as it can be read, and each device does its share.

What is counted:
- FLOPs of matrix products, two per multiplication and addition.
- Bytes between memory and the compute units. Products, reductions, sorts and scatters read their
  operands and write their results; whatever is computed element by element is taken to be fused
  into what uses it, so that a packed weight is read packed. A scatter writes what it changes.
- Bytes that each device sends over its links, and how many times it has to.
- Steps: such operations one after another; a loop whose turns do not need each other is one turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.planner.cost import Cost, Site, Source
from specjax.planner.program import Op, Program, Value
from specjax.planner.spread import Axes, Spread, picks, result, to_be_whole, ways, whole

_WRITES = ("sort", "top_k", "cumsum", "cumprod", "cummax", "cumlogsumexp", "argmax", "argmin")
_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
_VIEWS = {
    "reshape", "squeeze", "slice", "split", "broadcast_in_dim", "iota", "bitcast_convert_type",
    "stop_gradient", "transpose", "dynamic_slice", "optimization_barrier",
}  # fmt: skip


@dataclasses.dataclass
class _Cell:
    """A value while the program is walked.

    Attributes:
        spread: how it lies.
        held: memory that must be read to have it.
        fixed: it is an input, or made of inputs alone without a stop in memory.
        stored: it lies in memory.
        debt: the exchange that would make it whole.
    """

    spread: Spread
    held: dict[Source, float]
    fixed: bool = False
    stored: bool = False
    debt: _Debt | None = None

    @property
    def owes(self) -> Axes:
        """Axes over which it is not whole."""
        return self.spread.partial | self.spread.elsewhere


@dataclasses.dataclass(eq=False)
class _Debt:
    """What is partial or elsewhere stays so only until the first that needs it whole.

    Attributes:
        paid: axes over which that has happened.
    """

    paid: Axes = frozenset()


def walk(
    program: Program, spreads: Sequence[Spread] | None = None, mesh: Mapping[str, int] | None = None
) -> Cost:
    """Count a program.

    Args:
        program: see `planner.program.flatten`.
        spreads: how its inputs lie; None: whole on each device.
        mesh: sizes of the axes.
    """
    walker = _Walker(mesh or {})
    lies = spreads or [whole(len(value.shape)) for value in program.inputs]
    cells = [
        _Cell(spread, {Source(): walker.size(value, spread)}, fixed=True, stored=True)
        for value, spread in zip(program.inputs, lies, strict=True)
    ]
    outs, sites, peak = walker.run(program, cells)
    stages = {value: op.stage for op in program.ops for value in op.outs}
    for value, cell in zip(program.outputs, outs, strict=True):
        # Written by whatever makes it, hence no step of its own.
        sites += walker.stop(stages.get(value, ""), [value], [cell], steps=0)
    return Cost(tuple(sites), peak)


class _Walker:
    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = mesh

    def size(self, value: Value, spread: Spread) -> float:
        """Bytes that one device has of a value."""
        return value.nbytes / ways(self.mesh, spread.axes)

    def run(
        self, program: Program, inputs: Sequence[_Cell]
    ) -> tuple[list[_Cell], list[Site], float]:
        """Walk a program: (cells of its outputs, sites, most bytes alive)."""
        cells = dict(zip(program.inputs, inputs, strict=True))
        sites: list[Site] = []
        last = {value: i for i, op in enumerate(program.ops) for value in op.ins}
        last |= dict.fromkeys(program.outputs, len(program.ops))
        for op in reversed(program.ops):
            if op.name in _VIEWS:  # what is looked at lives as long as the view
                for value in op.ins:
                    last[value] = max(last[value], *(last.get(out, -1) for out in op.outs))
        alive: dict[Value, float] = {}
        peak = 0.0
        for i, op in enumerate(program.ops):
            ins = [self._cell(cells, value) for value in op.ins]
            outs, more, inner = self._op(op, ins)
            for cell in outs:
                if cell.owes and cell.debt is None:
                    owed = [
                        c.debt for c in ins if c.debt and (c.spread.partial or c.spread.elsewhere)
                    ]
                    cell.debt = owed[0] if len(owed) == 1 else _Debt()
            sites += more
            cells |= dict(zip(op.outs, outs, strict=True))
            if op.name not in _VIEWS and not op.name.startswith(("scatter", "dynamic_update")):
                for value, cell in zip(op.outs, outs, strict=True):
                    if value in last and not cell.fixed:
                        alive[value] = self.size(value, cell.spread)
            peak = max(peak, sum(alive.values()) + inner)
            for value in (*op.ins, *op.outs):
                if last.get(value, -1) <= i:
                    alive.pop(value, None)
        outputs = [self._cell(cells, value) for value in program.outputs]
        return outputs, sites, peak

    def _cell(self, cells: dict[Value, _Cell], value: Value) -> _Cell:
        if value not in cells:  # a constant
            cells[value] = _Cell(whole(len(value.shape)), {}, fixed=True)
        cell = cells[value]
        if cell.debt is not None and cell.debt.paid & cell.owes:
            cell = cells[value] = dataclasses.replace(
                cell, spread=_without(cell.spread, cell.debt.paid)
            )
        return cell

    def _op(self, op: Op, ins: list[_Cell]) -> tuple[list[_Cell], list[Site], float]:
        """Walk an operation: (cells of its outputs, sites, bytes alive while it runs)."""
        ins, sites = self._made_whole(op, ins)
        if op.name == "scan":
            outs, more, inner = self._scan(op, ins)
            return outs, sites + more, inner
        if op.name == "cond":
            runs = [self.run(body, ins) for body in op.bodies]
            runs = [(outs, s + self.stop(op.stage, b.outputs, outs), peak)
                    for b, (outs, s, peak) in zip(op.bodies, runs, strict=True)]  # fmt: skip
            outs, more, inner = max(runs, key=lambda run: sum(s.bytes for s in run[1]))
            return self._stored(op.outs, [cell.spread for cell in outs]), sites + more, inner
        spreads, asked = result(op, [cell.spread for cell in ins])
        if asked:
            sites.append(self._exchange(op, ins[0], spreads[0], asked))
        if op.name in _PRODUCTS or op.name in _WRITES or op.name.startswith("reduce_"):
            sites.append(self._heavy(op, ins, spreads))
            unpacked = sum(
                self.size(value, cell.spread)
                for value, cell in zip(op.ins, ins, strict=True)
                if cell.fixed and not cell.stored and op.name in _PRODUCTS
            )
            return self._stored(op.outs, spreads), sites, unpacked
        if op.name.startswith("scatter") or op.name == "dynamic_update_slice":
            news = ins[1] if op.name == "dynamic_update_slice" else ins[2]
            value = op.ins[1] if op.name == "dynamic_update_slice" else op.ins[2]
            share = ways(self.mesh, news.spread.axes | ins[0].spread.axes)
            sites.append(
                Site(
                    op.stage, op.what, reads=dict(news.held), written=value.nbytes / share, steps=1
                )
            )
            held = {Source(): self.size(op.outs[0], spreads[0])}
            return [_Cell(spreads[0], held, stored=True)], sites, 0.0
        return [self._fused(op, ins, s, i) for i, s in enumerate(spreads)], sites, 0.0

    def _made_whole(self, op: Op, ins: list[_Cell]) -> tuple[list[_Cell], list[Site]]:
        """Exchange what an operation cannot work on in parts."""
        plain = [
            not cell.fixed and value.shape != () for cell, value in zip(ins, op.ins, strict=True)
        ]
        plain = [p and op.ins[i].shape == op.outs[0].shape for i, p in enumerate(plain)]
        ins, sites = list(ins), []
        for at, axes in to_be_whole(op, [cell.spread for cell in ins], plain):
            cell, value = ins[at], op.ins[at]
            if cell.debt is not None:
                if axes <= cell.debt.paid:  # by another input of this operation
                    ins[at] = dataclasses.replace(cell, spread=_without(cell.spread, axes))
                    continue
                cell.debt.paid |= axes
            spread = _without(cell.spread, axes)
            devices = ways(self.mesh, axes)
            local = math.prod(value.shape) * cell.spread.itemsize / ways(self.mesh, spread.axes)
            sent = 2 * (devices - 1) / devices * local
            sites.append(Site(op.stage, f"whole for {op.what}", sent=sent, exchanges=1))
            ins[at] = _Cell(spread, {Source(): self.size(value, spread)}, stored=True)
        return ins, sites

    def _exchange(self, op: Op, operand: _Cell, out: Spread, axes: Axes) -> Site:
        """A reduction over a split dimension exchanges its results, anything else its operand."""
        devices = ways(self.mesh, axes)
        if op.name in ("sort", "top_k") or op.name.startswith("cum"):
            full = op.ins[0].nbytes / ways(self.mesh, operand.spread.axes - axes)
            return Site(
                op.stage, f"whole for {op.what}", sent=(devices - 1) / devices * full, exchanges=1
            )
        sent = 2 * (devices - 1) / devices * self.size(op.outs[0], out)
        return Site(op.stage, f"whole for {op.what}", sent=sent, exchanges=1)

    def _heavy(self, op: Op, ins: Sequence[_Cell], spreads: Sequence[Spread]) -> Site:
        site = Site(op.stage, op.what, steps=1)
        for cell in ins:
            for source, read in cell.held.items():
                site.reads[source] = site.reads.get(source, 0.0) + read
        site.written = sum(self.size(v, s) for v, s in zip(op.outs, spreads, strict=True))
        if op.name in _PRODUCTS:
            shared = Spread(()).axes.union(*(cell.spread.axes for cell in ins))
            dtype = max((v.dtype for v in op.ins[:2]), key=lambda d: d.itemsize)
            site.flops[str(dtype)] = product_flops(op) / ways(self.mesh, shared)
        return site

    def _stored(self, values: Sequence[Value], spreads: Sequence[Spread]) -> list[_Cell]:
        return [
            _Cell(spread, {Source(): self.size(value, spread)}, stored=True)
            for value, spread in zip(values, spreads, strict=True)
        ]

    def _fused(self, op: Op, ins: Sequence[_Cell], spread: Spread, index: int) -> _Cell:
        """What is made without a stop in memory: to have it is to read what it is made of."""
        out = op.outs[index]
        if not ins:
            return _Cell(spread, {}, fixed=True)
        picking = op.name in ("gather", "dynamic_slice")
        if picking or op.name in ("slice", "split"):
            table, value = ins[0], op.ins[0]
            all_of_it = sum(table.held.values())
            share = min(math.prod(out.shape) / max(math.prod(value.shape), 1), 1.0)
            if not table.stored:  # made of fewer bytes than it has: a part may need all of them
                share = min(self.size(out, spread) / all_of_it, 1.0) if all_of_it else 0.0
            levels = picks(op) - (op.name == "gather") if picking else 0
            stored = table.stored and op.name != "gather"
            if levels > 0 and share < 1:
                part = {Source(all_of_it, levels): all_of_it * share}
                return _Cell(spread, part, table.fixed, stored)
            scaled = {source: each * share for source, each in table.held.items()}
            return _Cell(spread, scaled, table.fixed, stored)
        held: dict[Source, float] = {}
        for cell in ins:
            for source, each in cell.held.items():
                held[source] = held.get(source, 0.0) + each
        fixed = all(cell.fixed for cell in ins)
        own = self.size(out, spread)
        if not fixed and sum(held.values()) > own:
            held = {Source(): own}
        as_many = math.prod(out.shape) == math.prod(op.ins[0].shape)
        stored = op.name in _VIEWS and as_many and all(cell.stored for cell in ins)
        return _Cell(spread, held, fixed, stored)

    def stop(
        self, stage: str, values: Sequence[Value], cells: Sequence[_Cell], steps: int = 1
    ) -> list[Site]:
        """Write to memory what is handed on by a loop, a branch or the program."""
        return [
            Site(
                stage,
                "hand on",
                reads=dict(cell.held),
                written=self.size(value, cell.spread),
                steps=steps,
            )
            for value, cell in zip(values, cells, strict=True)
            if not cell.stored and value.shape and cell.held
        ]

    def _scan(self, op: Op, ins: Sequence[_Cell]) -> tuple[list[_Cell], list[Site], float]:
        (body,), turns = op.bodies, op.params["length"]
        consts, carries, first = op.carried.start, len(op.carried), op.carried.stop
        inner: list[_Cell] = list(ins[:consts])
        for cell, value in zip(ins[consts:first], op.ins[consts:first], strict=True):
            inner.append(_Cell(cell.spread, {Source(): self.size(value, cell.spread)}, stored=True))
        for cell in ins[first:]:
            spread = dataclasses.replace(cell.spread, dims=cell.spread.dims[1:])
            held = {source: each / max(turns, 1) for source, each in cell.held.items()}
            inner.append(dataclasses.replace(cell, spread=spread, held=held))
        outs, sites, peak = self.run(body, inner)
        sites = sites + self.stop(op.stage, body.outputs, outs)
        looped = [site.looped(turns, waiting=carries > 0) for site in sites]
        spreads = [
            cell.spread
            if i < carries
            else dataclasses.replace(cell.spread, dims=(frozenset(), *cell.spread.dims))
            for i, cell in enumerate(outs)
        ]
        return self._stored(op.outs, spreads), looped, peak


def _without(spread: Spread, axes: Axes) -> Spread:
    return dataclasses.replace(
        spread, partial=spread.partial - axes, elsewhere=spread.elsewhere - axes
    )


def product_flops(op: Op) -> float:
    """Return the FLOPs of a product on one device that has all of it."""
    out = math.prod(op.outs[0].shape)
    if op.name == "conv_general_dilated":
        kernel = op.ins[1].shape
        channels: Any = op.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * out * math.prod(kernel) / kernel[channels]
    numbers = op.params.get("dimension_numbers", op.params.get("ragged_dot_dimension_numbers"))
    numbers = getattr(numbers, "dot_dimension_numbers", numbers)
    (summed, _), _ = numbers
    return 2.0 * out * math.prod(op.ins[0].shape[d] for d in summed)
