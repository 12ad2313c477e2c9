"""One tree describes a model's weights; specs, shapes, counts and names are loops over it.

A family's weight dataclasses are registered pytrees. `abstract(config)` fills them with
`ParamSpec` leaves; the loader, the exporter, the planner and the initialiser replace those leaves
by arrays or shapes. `None` stands for a weight that the configuration does not have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What one weight is before it has values.

    Attributes:
        shape: its shape as we hold it, which is also the published one.
        axes: one logical axis name (or None) per dimension: "embed", "heads", "kv_heads", "mlp",
            "experts", "vocab", "layers".
        hf: the published tensor's name; of a stack, its parts' common description.
        init: "normal" (standard deviation `scale`), "ones" or "zeros".
        dtype: a fixed dtype, or None for the dtype of the run.
        parts: of a stack (experts, scanned layers), what stands along its leading axis.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf: str
    init: str = "normal"
    dtype: str | None = None
    parts: tuple[ParamSpec, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a spec whose axes do not match its shape."""
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.hf}: {len(self.axes)} axis names for shape {self.shape}")

    def published(self) -> Iterator[ParamSpec]:
        """Iterate over the published tensors that make up this weight, in order."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.published()

    def struct(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Return shape and dtype, `dtype` standing in where the spec fixes none."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype or dtype))


def stack(specs: Sequence[ParamSpec], axis: str) -> ParamSpec:
    """Return the spec of equal weights stacked along a new leading axis named `axis`.

    Raises:
        ValueError: the weights differ in more than their names.
    """
    first = specs[0]
    alike = dataclasses.replace(first, hf="", parts=())
    if any(dataclasses.replace(s, hf="", parts=()) != alike for s in specs):
        raise ValueError(f"{first.hf} and what should be stacked with it are not alike")
    return ParamSpec(
        shape=(len(specs), *first.shape),
        axes=(axis, *first.axes),
        hf=first.hf if len(specs) == 1 else f"{first.hf} … {specs[-1].hf}",
        init=first.init,
        dtype=first.dtype,
        parts=tuple(specs),
    )


def is_spec(leaf: Any) -> bool:
    """Whether `leaf` is a ParamSpec."""
    return isinstance(leaf, ParamSpec)


def map_specs(function: Callable[..., Any], specs: PyTree, *rest: PyTree) -> PyTree:
    """Map over a spec tree, ParamSpecs being its leaves."""
    return jax.tree.map(function, specs, *rest, is_leaf=is_spec)


def leaves_with_names(specs: PyTree) -> list[tuple[str, ParamSpec]]:
    """List (path in the tree, spec) of every weight, in tree order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    return [(jax.tree_util.keystr(path).lstrip("."), spec) for path, spec in flat]


def count(specs: PyTree) -> int:
    """Count the parameters of a spec tree."""
    return sum(math.prod(spec.shape) for _, spec in leaves_with_names(specs))


def shapes(specs: PyTree, dtype: str = "float32") -> PyTree:
    """Turn specs into `jax.ShapeDtypeStruct`s, for `jax.eval_shape` and the planner."""
    return map_specs(lambda spec: spec.struct(dtype), specs)


def init_params(
    specs: PyTree, key: jax.Array, dtype: str = "float32", scale: float = 0.02
) -> PyTree:
    """Draw random weights for a spec tree.

    Args:
        specs: tree of ParamSpec.
        key: PRNG key; each leaf gets its own fold of it, by position in the tree.
        dtype: dtype of leaves whose spec fixes none.
        scale: standard deviation of "normal" leaves.
    """
    numbered = iter(range(len(leaves_with_names(specs))))

    def draw(spec: ParamSpec) -> jax.Array:
        leaf_dtype = jnp.dtype(spec.dtype or dtype)
        leaf_key = jax.random.fold_in(key, next(numbered))
        if spec.init == "ones":
            return jnp.ones(spec.shape, leaf_dtype)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, leaf_dtype)
        return (jax.random.normal(leaf_key, spec.shape, jnp.float32) * scale).astype(leaf_dtype)

    return map_specs(draw, specs)
