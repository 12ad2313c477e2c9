"""`flax.nnx` modules as draft heads, and ours as such modules.

A head here is a static object with pure methods over a tree of weights; an nnx module is an object
that holds its weights. `from_module` takes the module apart once, into its graph, which is static
and hashable, and its variables, which become the tree; every method puts it together again while
it is traced. Trainer and engine see a head like any other, and pay nothing in a compiled step.

What a method changes in its module is lost when it returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.core.errors import PairingError
from specjax.core.params import ParamSpec
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal, TrainBatch
from specjax.io.hf import load_params, save_checkpoint

PyTree = Any
Weights = dict[str, jax.Array]


class HeadModule(Protocol):
    """What `from_module` asks of an nnx module: `heads.base.Head`, with the weights inside.

    Attributes:
        name: the algorithm's name in records.
        taps: as in `Head`; `reads`, `max_tokens`, `max_context` and `has_confidence` may stand
            beside it.
    """

    name: str
    taps: tuple[int, ...]

    def init_state(self, batch: int, capacity: int, dtype: str) -> PyTree:
        """Return the state before any token; must not look at weights."""
        ...

    def observe(self, borrowed: Borrowed, state: PyTree, obs: Observation) -> PyTree:
        """Take in committed positions."""
        ...

    def propose(
        self, borrowed: Borrowed, state: PyTree, context: DraftContext, num: int
    ) -> Proposal:
        """Draft `num` tokens per row."""
        ...

    def loss(self, borrowed: Borrowed, batch: TrainBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the training loss and its metrics."""
        ...


@dataclasses.dataclass(frozen=True)
class Variable:
    """A weight of a module, without its value.

    Attributes:
        name: where it stands, its path joined by dots.
        shape: its shape.
        dtype: its dtype.
        trained: it is an `nnx.Param`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool


class Graph:
    """All of a module but its values: hashable, equal by value."""

    def __init__(self, graph: nnx.GraphDef, structure: Any, variables: tuple[Variable, ...]):
        """Keep the parts that `nnx.split` and flattening gave."""
        self.variables = variables
        self._parts = (graph, structure, variables)

    @classmethod
    def of(cls, module: nnx.Module) -> tuple[Graph, Weights]:
        """Take a module apart.

        Returns:
            (everything static, its values by name).

        Raises:
            PairingError: it holds a random stream.
        """
        graph, state = nnx.split(module)
        values, structure = jax.tree.flatten(state)
        for path, value in jax.tree_util.tree_leaves_with_path(state):
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                raise PairingError(
                    f"{type(module).__name__} holds a random stream"
                    f" ({jax.tree_util.keystr(path)}): draw from TrainBatch.key instead, as in"
                    " dropout(x, rngs=nnx.Rngs(batch.key))"
                )
        variables = tuple(
            Variable(
                ".".join(map(str, path)),
                tuple(value.shape),
                str(value.dtype),
                isinstance(variable, nnx.Param),
            )
            for (path, variable), value in zip(nnx.to_flat_state(state), values, strict=True)
        )
        return cls(graph, structure, variables), {
            variable.name: value for variable, value in zip(variables, values, strict=True)
        }

    def module(self, weights: Mapping[str, Any]) -> Any:
        """Put the module together."""
        graph, structure, variables = self._parts
        return nnx.merge(graph, jax.tree.unflatten(structure, [weights[v.name] for v in variables]))

    def __eq__(self, other: object) -> bool:
        """Graphs with equal parts are the same static argument."""
        return isinstance(other, Graph) and self._parts == other._parts

    def __hash__(self) -> int:
        """Hash the parts."""
        return hash(self._parts)

    def __str__(self) -> str:
        """Name the variables: the part of a run's fingerprint that tells shapes apart."""
        return "; ".join(f"{v.name} {v.dtype}{list(v.shape)}" for v in self.variables)


@dataclasses.dataclass(frozen=True)
class NnxHead:
    """A module as a head without its weights, which are a dict by name (`heads.base.Head`).

    Attributes:
        graph: the module.
        name: the module's, as are all that follow.
        taps: residual streams wanted.
        reads: layers of the target whose keys it reads.
        max_tokens: most drafts a round can have, or None.
        max_context: longest text it drafts for; 0 if it does not say.
        has_confidence: whether its proposals carry confidences.
    """

    graph: Graph
    name: str
    taps: tuple[int, ...]
    reads: tuple[int, ...] = ()
    max_tokens: int | None = None
    max_context: int = 0
    has_confidence: bool = False

    def specs(self) -> dict[str, ParamSpec]:
        """Return its weights by name."""
        return {
            v.name: ParamSpec(v.shape, (None,) * len(v.shape), v.name, dtype=_fixed(v.dtype))
            for v in self.graph.variables
        }

    def trainable(self) -> dict[str, bool]:
        """Return which weights training changes: the module's `nnx.Param`s."""
        return {v.name: v.trained for v in self.graph.variables}

    def init_state(self, batch: int, capacity: int, dtype: str = "float32") -> PyTree:
        """Return the module's state before any token."""
        shapes = {v.name: jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.graph.variables}
        return self.graph.module(shapes).init_state(batch, capacity, dtype)

    def observe(
        self, params: Weights, borrowed: Borrowed, state: PyTree, obs: Observation
    ) -> PyTree:
        """Take in committed positions."""
        return self.graph.module(params).observe(borrowed, state, obs)

    def propose(
        self,
        params: Weights,
        borrowed: Borrowed,
        state: PyTree,
        context: DraftContext,
        num: int,
    ) -> Proposal:
        """Draft `num` tokens per row."""
        return self.graph.module(params).propose(borrowed, state, context, num)

    def loss(
        self, params: Weights, borrowed: Borrowed, batch: TrainBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the training loss and its metrics."""
        return self.graph.module(params).loss(borrowed, batch)

    def save(self, params: Weights, path: str | Path, dtype: str | None = None) -> None:
        """Write the weights under their names; `load` reads them into such a module."""
        save_checkpoint(self.specs(), params, {"specjax_nnx": self.name}, path, dtype)


def from_module(module: HeadModule) -> tuple[NnxHead, Weights]:
    """Return (head, weights) of an nnx module.

    Raises:
        PairingError: it lacks a method of a head, or holds a random stream.
    """
    needed = ("name", "taps", "init_state", "observe", "propose", "loss")
    if missing := [name for name in needed if not hasattr(module, name)]:
        raise PairingError(f"{type(module).__name__} is no draft head: no {', '.join(missing)}")
    assert isinstance(module, nnx.Module)
    graph, weights = Graph.of(module)
    optional = ("reads", "max_tokens", "max_context", "has_confidence")
    said = {name: getattr(module, name) for name in optional if hasattr(module, name)}
    return NnxHead(graph, name=module.name, taps=tuple(module.taps), **said), weights


def load(module: HeadModule, path: str | Path, dtype: str = "float32") -> tuple[NnxHead, Weights]:
    """Return (head, weights) of a module with the weights that `NnxHead.save` wrote.

    Raises:
        CheckpointError: they do not fit the module; all faults are named.
    """
    head, _ = from_module(module)
    return head, load_params(head.specs(), path, dtype)


class Bound(nnx.Module):
    """One of our heads, or a target, as an nnx module that holds its weights.

    `call(method, ...)` is the method with the weights in place: `Bound(target,
    params).call("forward", tokens)`. A head's own methods are there by name, so that
    `from_module` takes it back.
    """

    def __init__(self, owner: Any, params: PyTree) -> None:
        """Hold the weights: `nnx.Param` what is trained, else `nnx.Variable`."""
        structure: Any
        leaves, structure = jax.tree.flatten(params)
        said = owner.trainable() if hasattr(owner, "trainable") else None
        wanted = [True] * len(leaves) if said is None else structure.flatten_up_to(said)
        self.owner, self.structure = owner, structure
        self.weights = nnx.List(
            nnx.Param(leaf)
            if want and jnp.issubdtype(leaf.dtype, jnp.floating)
            else nnx.Variable(leaf)
            for want, leaf in zip(wanted, leaves, strict=True)
        )
        if hasattr(owner, "propose"):
            self.name, self.taps, self.reads = owner.name, owner.taps, owner.reads
            self.max_tokens = owner.max_tokens
            self.max_context = getattr(owner, "max_context", 0)
            self.has_confidence = getattr(owner, "has_confidence", False)

    def params(self) -> PyTree:
        """Return the weights as the owner's tree."""
        return jax.tree.unflatten(self.structure, [leaf[...] for leaf in self.weights])

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the owner, its weights given."""
        return getattr(self.owner, method)(self.params(), *args, **kwargs)

    def init_state(self, batch: int, capacity: int, dtype: str = "float32") -> PyTree:
        """Return a head's state before any token."""
        return self.owner.init_state(batch, capacity, dtype)

    def observe(self, borrowed: Borrowed, state: PyTree, obs: Observation) -> PyTree:
        """Take in committed positions."""
        return self.call("observe", borrowed, state, obs)

    def propose(
        self, borrowed: Borrowed, state: PyTree, context: DraftContext, num: int
    ) -> Proposal:
        """Draft `num` tokens per row."""
        return self.call("propose", borrowed, state, context, num)

    def loss(self, borrowed: Borrowed, batch: TrainBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the training loss and its metrics."""
        return self.call("loss", borrowed, batch)


def _fixed(dtype: str) -> str | None:
    """Return a dtype that loading must not change, None for one of weights."""
    return None if jnp.issubdtype(dtype, jnp.floating) else dtype
