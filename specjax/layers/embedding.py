"""Embedding lookup that never converts the table."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def lookup(table: Float[Array, "V H"], tokens: Int[Array, "*B"]) -> Float[Array, "*B H"]:
    """Return the rows of `table` at `tokens`, in the table's dtype.

    XLA's CPU backend gathers from a bfloat16 table by converting all of it to float32 first, in
    every call; the same rows gathered as 16-bit integers cost only themselves.
    """
    return (
        _lookup_bits(table.shape, table, tokens) if table.dtype == jnp.bfloat16 else table[tokens]
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup_bits(shape: tuple[int, ...], table: jax.Array, tokens: jax.Array) -> jax.Array:
    del shape
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits[tokens], jnp.bfloat16)


def _forward(
    shape: tuple[int, ...], table: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _lookup_bits(shape, table, tokens), tokens


def _backward(shape: tuple[int, ...], tokens: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    # Summed in float32: many tokens may add to one row.
    total = jnp.zeros(shape, jnp.float32).at[tokens].add(g.astype(jnp.float32))
    return total.astype(g.dtype), None


_lookup_bits.defvjp(_forward, _backward)
