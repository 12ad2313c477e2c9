"""From logical axes to a mesh: one table per strategy, and what it makes of a tree of weights.

Weights name the axes of their dimensions (`ParamSpec.axes`); a table says which mesh axes split
each. Nothing is replicated silently: a dimension that does not divide is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
        ConfigError: more devices asked for than there are, or fewer than several processes have.
    """
    devices, processes = jax.devices(), jax.process_count()
    sizes = " x ".join(str(getattr(config, axis)) for axis in AXES)
    said = f"Mesh: {' x '.join(AXES)} = {sizes}"
    if config.devices > len(devices):
        raise ConfigError(f"{said} needs {config.devices} devices, there are {len(devices)}")
    if processes > 1 and config.devices < len(devices):
        raise ConfigError(
            f"{said} leaves devices idle that {processes} processes have: {len(devices)} in all"
        )
    # Explicit axes, jax's default, would ask for the sharding of every product's result.
    return jax.make_mesh(
        tuple(getattr(config, axis) for axis in AXES),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=devices[: config.devices],
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and a table: how anything with named axes lies on it. Hashable, so static in jit.

    Attributes:
        mesh: the devices.
        rules: logical axis to mesh axes.
    """

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, config: MeshConfig, strategy: Rules, mesh: Mesh | None = None) -> Layout:
        """Return a strategy with a configuration's changes, on its mesh or one at hand.

        Raises:
            ConfigError: see `make_mesh`.
        """
        rules = {**strategy, **config.changes}
        return cls(make_mesh(config) if mesh is None else mesh, tuple(rules.items()))

    @classmethod
    def served(cls, config: MeshConfig) -> Layout | None:
        """Return how weights that are only read lie on a mesh; None on the one device there is.

        Raises:
            ConfigError: see `make_mesh`.
        """
        spread = config.devices > 1 or jax.process_count() > 1
        return cls.of(config, SERVED) if spread else None

    def spec(self, axes: Sequence[str | None], shape: Sequence[int], name: str) -> PartitionSpec:
        """Return how an array is split.

        Args:
            axes: logical axis of each dimension, None for one that is not split.
            shape: its shape.
            name: of the array, for messages.

        Raises:
            ConfigError: a dimension that does not divide, two dimensions on one mesh axis, or a
                logical axis without a rule.
        """
        rules = dict(self.rules)
        parts: list[tuple[str, ...] | str | None] = []
        taken: dict[str, str] = {}
        for size, axis in zip(shape, axes, strict=True):
            if axis is not None and axis not in rules:
                raise ConfigError(f"{name}: no rule for the axis {axis!r}")
            split = tuple(a for a in (rules[axis] if axis else ()) if self.mesh.shape[a] > 1)
            ways = math.prod(self.mesh.shape[a] for a in split)
            if size % ways:
                raise ConfigError(
                    f"{name}: {axis} of {size} does not divide over {' x '.join(split)} of {ways};"
                    f" choose another mesh, or set Mesh.rules '{axis}='"
                )
            for a in split:
                if a in taken:
                    raise ConfigError(
                        f"{name}: {taken[a]} and {axis} both lie on the mesh axis {a}: change one"
                        " in Mesh.rules"
                    )
                taken[a] = str(axis)
            parts.append(split[0] if len(split) == 1 else split or None)
        # As jax writes those of results: others would be another type, and compile once more.
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)

    def weight(self, spec: ParamSpec) -> NamedSharding:
        """Return the sharding of a weight.

        Raises:
            ConfigError: see `spec`.
        """
        return NamedSharding(self.mesh, self.spec(spec.axes, spec.shape, spec.hf))

    def weights(self, specs: PyTree) -> PyTree:
        """Return the sharding of every weight of a tree of ParamSpec.

        Raises:
            ConfigError: see `spec`.
        """
        return jax.tree.map(self.weight, specs, is_leaf=is_spec)

    @property
    def rows(self) -> NamedSharding:
        """The sharding of arrays whose axis 0 are the rows of a batch."""
        return NamedSharding(self.mesh, PartitionSpec(dict(self.rules)["batch"]))

    @property
    def whole(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def check_rows(self, count: int, name: str) -> None:
        """Refuse a batch whose rows cannot be split evenly.

        Raises:
            ConfigError: names the setting and the mesh axes.
        """
        axes = dict(self.rules)["batch"]
        ways = math.prod(self.mesh.shape[a] for a in axes)
        if count % ways:
            raise ConfigError(f"{name} {count} does not divide over {' x '.join(axes)} of {ways}")


def constrain(
    layout: Layout | None, x: jax.Array, axes: Sequence[str | None], name: str = "an activation"
) -> jax.Array:
    """Keep an activation of a compiled function where it belongs.

    Rows that do not divide, as those of a single prompt, are not split.

    Args:
        layout: the layout; None leaves `x` to the compiler.
        x: the activation.
        axes: as in `Layout.spec`.
        name: for messages.
    """
    if layout is None:
        return x
    rows = math.prod(layout.mesh.shape[a] for a in dict(layout.rules)["batch"])
    split = [
        None if axis == "batch" and size % rows else axis
        for axis, size in zip(axes, x.shape, strict=True)
    ]
    where = NamedSharding(layout.mesh, layout.spec(split, x.shape, name))
    return jax.lax.with_sharding_constraint(x, where)
