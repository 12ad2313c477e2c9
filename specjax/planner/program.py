"""A traced program as a flat list of operations: calls inlined, decided branches taken.

jax nests what it traces (`jit`, custom derivatives, branches by platform). Here only loops and
branches that are decided at run time stay nested, values known at trace time are carried along so
that branches on them are decided, and operations whose results nobody uses are left out, as the
compiler leaves them out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.extend import core as jex

STAGES = ("propose", "forward", "verify", "commit", "observe")
_KNOWN_SIZE = 4096  # larger values are not carried along
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a program; equal to itself alone.

    Attributes:
        shape: its shape.
        dtype: its dtype; of a PRNG key jax's own.
        known: its content, where that is known when the program is traced.
    """

    shape: tuple[int, ...]
    dtype: Any
    known: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(eq=False)
class Op:
    """An operation.

    Attributes:
        name: of jax's primitive.
        params: its static parameters.
        ins: what it reads.
        outs: what it makes.
        stage: of a decode round ("propose", ...), "" outside them.
        bodies: of a "scan" its turn, of a "cond" its branches.
    """

    name: str
    params: Mapping[str, Any]
    ins: list[Value]
    outs: list[Value]
    stage: str
    bodies: tuple[Program, ...] = ()

    @property
    def what(self) -> str:
        """The operation and the shapes of what it reads, for people."""
        return f"{self.name} {' '.join(str(list(value.shape)) for value in self.ins)}"

    @property
    def carried(self) -> range:
        """Of a "scan": which of its inputs it carries from turn to turn; constants come before."""
        (body,) = self.bodies
        # What is cut in slices has a dimension less in a turn; jax's own numbers are not public.
        pairs = zip(self.ins, body.inputs, strict=True)
        sliced = sum(len(whole.shape) > len(part.shape) for whole, part in pairs)
        pairs = zip(self.outs, body.outputs, strict=True)
        carried = sum(len(whole.shape) == len(part.shape) for whole, part in pairs)
        end = len(self.ins) - sliced
        return range(end - carried, end)


@dataclasses.dataclass(eq=False)
class Program:
    """Operations in order.

    Attributes:
        inputs: what it is given.
        ops: what it does.
        outputs: what it returns.
    """

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value]


def flatten(
    closed: Any, platform: str, known: Mapping[int, np.ndarray] = MappingProxyType({})
) -> Program:
    """Return a traced program (of `jax.make_jaxpr`) as operations.

    Args:
        closed: the ClosedJaxpr.
        platform: whose branches are taken where they differ: "cpu", "cuda", "rocm".
        known: contents of inputs, by their number, that decide branches.

    Raises:
        ValueError: a `while_loop`, whose turns nobody can count.
    """
    return _program(closed.jaxpr, closed.consts, platform, "", known)


def _program(
    jaxpr: Any,
    consts: Sequence[Any],
    platform: str,
    stage: str,
    known: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> Program:
    inputs = [_value(var) for var in jaxpr.invars]
    for number, content in known.items():
        inputs[number].known = content
    ops: list[Op] = []
    outputs = _inline(jaxpr, consts, inputs, ops, platform, stage)
    return Program(inputs, _used(ops, outputs), outputs)


def _inline(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Value],
    ops: list[Op],
    platform: str,
    stage: str,
) -> list[Value]:
    """Append a jaxpr's operations to `ops`; returns its outputs."""
    env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = dataclasses.replace(_value(var), known=_small(const))

    def read(atom: Any) -> Value:
        if isinstance(atom, jex.Literal):
            return dataclasses.replace(_value(atom), known=np.asarray(atom.val))
        return env[atom]

    for eqn in jaxpr.eqns:
        name, params, ins = eqn.primitive.name, eqn.params, [read(atom) for atom in eqn.invars]
        where = stage or _stage(eqn)
        if name == "while":
            raise ValueError("a while_loop in the program: its turns cannot be counted")
        if name == "cond" and ins[0].known is not None:
            index = int(np.clip(ins[0].known, 0, len(params["branches"]) - 1))
            branch = params["branches"][index]
            outs = _inline(branch.jaxpr, branch.consts, ins[1:], ops, platform, where)
        elif name == "cond":
            bodies = tuple(
                _program(branch.jaxpr, branch.consts, platform, where)
                for branch in params["branches"]
            )
            outs = [_value(var) for var in eqn.outvars]
            ops.append(Op(name, params, ins[1:], outs, where, bodies))
        elif name == "scan":
            body = params["jaxpr"]
            bodies = (_program(body.jaxpr, body.consts, platform, where),)
            outs = [_value(var) for var in eqn.outvars]
            ops.append(Op(name, params, ins, outs, where, bodies))
        elif called := next((params[key] for key in _CALLED if key in params), None):
            inner = getattr(called, "jaxpr", called)
            outs = _inline(inner, getattr(called, "consts", ()), ins, ops, platform, where)
        else:
            outs = [_value(var) for var in eqn.outvars]
            if name == "platform_index":
                outs[0].known = np.asarray(_platform(params["platforms"], platform))
            elif name in _EVALUATE and all(value.known is not None for value in ins):
                outs[0].known = _small(_EVALUATE[name](params, *(v.known for v in ins)))
            ops.append(Op(name, params, ins, outs, where))
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _value(atom: Any) -> Value:
    return Value(tuple(atom.aval.shape), atom.aval.dtype)


def _small(content: Any) -> np.ndarray | None:
    small = math.prod(np.shape(content)) <= _KNOWN_SIZE
    return np.asarray(content) if small and hasattr(content, "dtype") else None


def _stage(eqn: Any) -> str:
    scopes = str(eqn.source_info.name_stack).split("/")
    return next((scope for scope in scopes if scope in STAGES), "")


def _platform(platforms: Iterable[tuple[str, ...] | None], platform: str) -> int:
    """Return which of the lists of platforms is meant; None stands for all others."""
    return next(i for i, names in enumerate(platforms) if names is None or platform in names)


def _used(ops: Sequence[Op], outputs: Sequence[Value]) -> list[Op]:
    """Return the operations that the outputs depend on."""
    wanted, kept = set(outputs), []
    for op in reversed(ops):
        if not wanted.isdisjoint(op.outs):
            kept.append(op)
            wanted.update(op.ins)
    return kept[::-1]


# What branches are decided by: whether any row samples.
_EVALUATE: dict[str, Callable[..., Any]] = {
    "gt": lambda p, a, b: np.asarray(a > b),
    "ge": lambda p, a, b: np.asarray(a >= b),
    "lt": lambda p, a, b: np.asarray(a < b),
    "eq": lambda p, a, b: np.asarray(a == b),
    "ne": lambda p, a, b: np.asarray(a != b),
    "and": lambda p, a, b: np.asarray(a & b),
    "or": lambda p, a, b: np.asarray(a | b),
    "not": lambda p, a: np.asarray(~a),
    "reduce_or": lambda p, a: np.asarray(np.any(a, axis=tuple(p["axes"]))),
    "convert_element_type": lambda p, a: np.asarray(a).astype(p["new_dtype"]),
    "broadcast_in_dim": lambda p, a: _broadcast(a, p["shape"], p["broadcast_dimensions"]),
}


def _broadcast(a: np.ndarray, shape: Sequence[int], dims: Sequence[int]) -> np.ndarray | None:
    if math.prod(shape) > _KNOWN_SIZE:
        return None
    lined_up = [1] * len(shape)
    for size, dim in zip(a.shape, dims, strict=True):
        lined_up[dim] = size
    return np.broadcast_to(a.reshape(lined_up), shape)
