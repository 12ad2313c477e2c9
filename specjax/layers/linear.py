"""Matrix products with stated precision and float32 accumulation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, w, contract, precision=precision, preferred_element_type=jnp.float32
    )


def _doubled_row(x: jax.Array, w: jax.Array) -> jax.Array:
    # XLA's CPU backend has no bfloat16 kernel for a product with a single row: it converts the
    # whole weight to float32 first (about ten times slower). Two equal rows take the fast kernel.
    lead = x.shape[:-1]
    rows = jnp.broadcast_to(x.reshape(1, x.shape[-1]), (2, x.shape[-1]))
    return _product(rows, w)[:1].reshape(*lead, w.shape[0])


def linear_f32(
    x: Float[Array, "... I"], w: Float[Array, "O I"], bias: Float[Array, O] | None = None
) -> Float[Array, "... O"]:
    """Compute `x @ w.T + bias`, accumulated and returned in float32.

    Weights keep the published `[out, in]` layout. A weight of another dtype than `x` is used as
    `x`'s dtype.
    """
    w = w.astype(x.dtype)
    if x.dtype == jnp.bfloat16 and math.prod(x.shape[:-1]) == 1:
        y = jax.lax.platform_dependent(x, w, cpu=_doubled_row, default=_product)
    else:
        y = _product(x, w)
    return y if bias is None else y + bias.astype(jnp.float32)


def linear(
    x: Float[Array, "... I"], w: Float[Array, "O I"], bias: Float[Array, O] | None = None
) -> Float[Array, "... O"]:
    """Compute `x @ w.T + bias` with float32 accumulation, returned in the dtype of `x`."""
    return linear_f32(x, w, bias).astype(x.dtype)
