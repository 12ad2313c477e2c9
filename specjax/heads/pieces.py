"""What is as wide as a vocabulary, a few columns at a time.

Logits of all positions of a batch over a large vocabulary do not fit, and need not: each position
is compared for itself, and the backward pass can compute its logits anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

PyTree = Any

ELEMENTS = 1 << 24
"""Numbers of an array of logits that exist at one time, if a column of the batch is not more."""


def in_pieces(
    function: Callable[[PyTree], PyTree],
    parts: PyTree,
    counted: Bool[Array, "B R"],
    width: int,
) -> PyTree:
    """Apply a function to columns of a batch, no more at a time than `ELEMENTS` allows.

    In several pieces, columns that count come first, and a piece without any is left out at run
    time. Every piece holds columns of all rows, so that a batch whose rows are spread over devices
    stays where it is.

    Args:
        function: from parts `[B, n, ...]` to a tree of arrays `[B, n, ...]`, column by column.
        parts: tree of arrays `[B, R, ...]`.
        counted: columns whose results matter; those of others may be zeros.
        width: numbers in the widest array that the function makes of one position.

    Returns:
        The function's results `[B, R, ...]`.
    """
    rows, length = counted.shape
    most = max(ELEMENTS // max(rows * width, 1), 1)
    if length <= most:
        return function(parts)
    count = math.ceil(length / most)
    size = math.ceil(length / count)
    order = jnp.argsort(~counted, axis=1, stable=True)
    back = jnp.argsort(order, axis=1)

    def pick(x: jax.Array, at: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, index: row[index])(x, at)

    def cut(x: jax.Array) -> jax.Array:
        x = pick(x, order)
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, count, size, *x.shape[2:]), 1, 0)

    def piece(given: tuple[jax.Array, PyTree]) -> PyTree:
        used, part = given

        def nothing(part: PyTree) -> PyTree:
            shapes = jax.eval_shape(function, part)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        return jax.lax.cond(jnp.any(used), function, nothing, part)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1).reshape(rows, count * size, *x.shape[3:])
        return pick(x, back)

    found = jax.lax.map(jax.checkpoint(piece), (cut(counted), jax.tree.map(cut, parts)))
    return jax.tree.map(join, found)
