"""From logical axes to a mesh: one table per strategy, and what it makes of a tree of weights.

Weights name the axes of their dimensions (`ParamSpec.axes`); a table says which mesh axes split
each. Nothing is replicated silently: a dimension that does not divide is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.core.errors import ConfigError
from specjax.core.mesh_config import AXES, MeshConfig
from specjax.core.params import ParamSpec, is_spec

PyTree = Any
Rules = Mapping[str, tuple[str, ...]]

SERVED: Rules = {
    "batch": ("data", "fsdp"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "embed": (),
    "layers": (),
}
"""Weights that are only read: the products of a layer are split, and added up twice a layer."""

TRAINED: Rules = {**SERVED, "embed": ("fsdp",)}
"""Weights that are trained: with their gradients and moments split over `fsdp` besides."""


def make_mesh(config: MeshConfig) -> Mesh:
    """Return the mesh, of the first devices there are.

    Raises:
        ConfigError: more devices asked for than there are.
    """
    devices = jax.devices()
    if config.devices > len(devices):
        sizes = " x ".join(str(getattr(config, axis)) for axis in AXES)
        raise ConfigError(
            f"Mesh: {' x '.join(AXES)} = {sizes} needs {config.devices} devices, there are"
            f" {len(devices)}"
        )
    # Explicit axes, jax's default, would ask for the sharding of every product's result.
    return jax.make_mesh(
        tuple(getattr(config, axis) for axis in AXES),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=devices[: config.devices],
    )


def table(strategy: Rules, config: MeshConfig) -> Rules:
    """Return a strategy's table with a configuration's changes."""
    return {**strategy, **config.changes}


def partition(spec: ParamSpec, mesh: Mesh, rules: Rules) -> PartitionSpec:
    """Return how a weight is split.

    Raises:
        ConfigError: a dimension that does not divide, two dimensions on one mesh axis, or a
            logical axis without a rule; names the weight.
    """
    parts: list[tuple[str, ...] | str | None] = []
    taken: dict[str, str] = {}
    for size, axis in zip(spec.shape, spec.axes, strict=True):
        if axis is not None and axis not in rules:
            raise ConfigError(f"{spec.hf}: no rule for the axis {axis!r}")
        split = tuple(a for a in (rules[axis] if axis else ()) if mesh.shape[a] > 1)
        ways = math.prod(mesh.shape[a] for a in split)
        if size % ways:
            raise ConfigError(
                f"{spec.hf}: {axis} of {size} does not divide over {' x '.join(split)} of {ways};"
                f" choose another mesh, or set Mesh.rules '{axis}='"
            )
        for a in split:
            if a in taken:
                raise ConfigError(
                    f"{spec.hf}: {taken[a]} and {axis} both lie on the mesh axis {a}: change one"
                    " in Mesh.rules"
                )
            taken[a] = str(axis)
        parts.append(split[0] if len(split) == 1 else split or None)
    # As jax writes those of results: others would be another type, and compile once more.
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def shardings(specs: PyTree, mesh: Mesh, rules: Rules) -> PyTree:
    """Return the sharding of every weight of a tree of ParamSpec.

    Raises:
        ConfigError: see `partition`.
    """
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, partition(spec, mesh, rules)), specs, is_leaf=is_spec
    )


def of_batch(mesh: Mesh, rules: Rules) -> NamedSharding:
    """Return the sharding of arrays whose axis 0 are the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(rules["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch(rows: int, mesh: Mesh, rules: Rules, name: str) -> None:
    """Refuse a batch whose rows cannot be split evenly.

    Raises:
        ConfigError: names the setting and the mesh axes.
    """
    axes = rules["batch"]
    ways = math.prod(mesh.shape[a] for a in axes)
    if rows % ways:
        raise ConfigError(f"{name} {rows} does not divide over {' x '.join(axes)} of {ways}")
