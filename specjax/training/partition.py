"""Which leaves of a head are trained, and how a head's tree is taken apart and put together."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import hosts
from specjax.core.errors import TrainingError

PyTree = Any
Leaves = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Partition:
    """The split of one tree structure into trained and frozen leaves, each a dict by path.

    Integer and boolean leaves (a draft vocabulary's maps) are frozen always.

    Attributes:
        structure: of the whole tree.
        names: path of every leaf, in tree order.
        trained: whether each is trained.
    """

    structure: Any
    names: tuple[str, ...]
    trained: tuple[bool, ...]

    @classmethod
    def of(cls, params: PyTree, trainable: PyTree | None = None) -> Partition:
        """Split by dtype, and by a tree of bools like `params` (None: train all that floats).

        Raises:
            TrainingError: nothing is left to train.
        """
        flat, structure = jax.tree_util.tree_flatten_with_path(params)
        wanted = [True] * len(flat) if trainable is None else structure.flatten_up_to(trainable)
        trained = tuple(
            bool(want) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))
            for want, (_, leaf) in zip(wanted, flat, strict=True)
        )
        if not any(trained):
            raise TrainingError("every weight of the head is frozen: there is nothing to train")
        names = (jax.tree_util.keystr(path).lstrip(".") for path, _ in flat)
        return cls(structure, tuple(names), trained)

    def split(self, params: PyTree) -> tuple[Leaves, Leaves]:
        """Return (trained leaves in float32, frozen leaves as they are)."""
        parts: tuple[Leaves, Leaves] = ({}, {})
        for name, is_trained, leaf in zip(
            self.names, self.trained, self.structure.flatten_up_to(params), strict=True
        ):
            parts[not is_trained][name] = leaf.astype(jnp.float32) if is_trained else leaf
        return parts

    def join(self, trained: Leaves, frozen: Leaves) -> PyTree:
        """Return the whole tree again."""
        both = {**trained, **frozen}
        return jax.tree_util.tree_unflatten(self.structure, [both[name] for name in self.names])


def cast_floats(tree: PyTree, dtype: str) -> PyTree:
    """Cast floating leaves; the gradient of a cast master weight is float32 again."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def digest(leaf: Any) -> str:
    """Return a short digest of an array's shape, dtype and bytes; all processes must call it."""
    array = np.asarray(hosts.fetch(leaf))
    head = f"{array.shape} {array.dtype} ".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()[:12]
