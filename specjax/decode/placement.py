"""How what a round carries on lies on a mesh: lanes over `data`, heads of caches over `tensor`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

from specjax.core.errors import ConfigError
from specjax.core.params import is_spec
from specjax.core.sharding import Layout
from specjax.core.stack import Stacked

PyTree = Any


def _is_record(node: Any) -> bool:
    return isinstance(node, Stacked) or hasattr(type(node), "AXES")


def shardings(layout: Layout, state: PyTree, rows: int) -> PyTree:
    """Return the shardings of a state whose leaves have the lanes on axis 0.

    Records of caches say themselves what their axes are (`AXES`); of scanned layers the layers
    come first. A batch of one, as prompts are taken in, is not split.

    Args:
        layout: of what is served.
        state: arrays or shapes.
        rows: lanes.

    Raises:
        ConfigError: lanes or heads that do not divide.
    """
    if rows == 1:
        layout = dataclasses.replace(layout, rules=(*layout.rules, ("batch", ())))

    def lay(lead: tuple[None, ...], axes: tuple[str | None, ...], leaf: Any, name: str) -> Any:
        whole = (*lead, *axes, *(None,) * (len(leaf.shape) - len(lead) - len(axes)))
        return NamedSharding(layout.mesh, layout.spec(whole, leaf.shape, name))

    def place(node: Any, lead: tuple[None, ...] = ()) -> Any:
        if isinstance(node, Stacked):
            inner = jax.tree.map(lambda n: place(n, (None,)), node.tree, is_leaf=_is_record)
            return Stacked(inner)
        if not _is_record(node):
            return lay(lead, ("batch",), node, "a state")
        name = type(node).__name__
        fields = type(node).AXES.items()
        return dataclasses.replace(
            node, **{f: lay(lead, axes, getattr(node, f), f"{name}.{f}") for f, axes in fields}
        )

    return jax.tree.map(place, state, is_leaf=_is_record)


def constrain(layout: Layout | None, state: PyTree, rows: int) -> PyTree:
    """Keep a state where it belongs, within a compiled function."""
    if layout is None:
        return state
    return jax.lax.with_sharding_constraint(state, shardings(layout, state, rows))


def put_weights(layout: Layout, specs: PyTree, params: PyTree, what: str) -> PyTree:
    """Put weights where they belong; those that lie on the mesh already stay.

    Args:
        layout: of what is served.
        specs: tree of ParamSpec.
        params: the weights.
        what: they are of, for messages.

    Raises:
        ConfigError: weights in packed storage that were not loaded onto the mesh.
    """
    if all(_is_on(layout, leaf) for leaf in jax.tree.leaves(params)):
        return params
    plain = jax.tree.structure(jax.tree.map(lambda _: 0, specs, is_leaf=is_spec))
    if plain != jax.tree.structure(params):
        raise ConfigError(
            f"the {what} is held in packed storage: load it onto the mesh, by"
            " targets.load(..., shardings=Layout.of(mesh, SERVED).weights)"
        )
    return jax.device_put(params, layout.weights(specs))


def _is_on(layout: Layout, leaf: Any) -> bool:
    where = getattr(leaf, "sharding", None)
    return isinstance(where, NamedSharding) and where.mesh == layout.mesh
