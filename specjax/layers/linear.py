"""Matrix products with stated precision and float32 accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.core.packed import Packed, dense


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        x, w, contract, precision=_precision(x), preferred_element_type=jnp.float32
    )


def _product_on_cpu(x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute `w x^T` and turn the small result.

    With the weight on the right, XLA's CPU backend copies every weight into a transposed layout in
    front of a loop (SmolLM2 in bfloat16: 110 ms per call of the decode loop), and 40 rows take
    twice as long. A bfloat16 product with a single row has no kernel at all: the weight would be
    converted to float32 (about ten times slower), so the row is doubled.
    """
    rows = x.reshape(-1, x.shape[-1])
    single = rows.shape[0] == 1 and x.dtype == jnp.bfloat16
    if single:
        rows = jnp.broadcast_to(rows, (2, rows.shape[1]))
    contract = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(
        w, rows, contract, precision=_precision(x), preferred_element_type=jnp.float32
    ).T
    return (y[:1] if single else y).reshape(*x.shape[:-1], w.shape[0])


def linear_f32(
    x: Float[Array, "... I"],
    w: Float[Array, "O I"] | Packed,
    bias: Float[Array, " O"] | None = None,
) -> Float[Array, "... O"]:
    """Compute `x @ w.T + bias`, accumulated and returned in float32.

    Weights keep the published `[out, in]` layout. A weight of another dtype than `x` is used as
    `x`'s dtype, a packed one is unpacked to it here.
    """
    y = jax.lax.platform_dependent(x, dense(w, x.dtype), cpu=_product_on_cpu, default=_product)
    return y if bias is None else y + bias.astype(jnp.float32)


def capped(logits: Float[Array, "*B V"], cap: float | None) -> Float[Array, "*B V"]:
    """Return `cap * tanh(logits / cap)`, or the logits as they are without a cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def linear(
    x: Float[Array, "... I"],
    w: Float[Array, "O I"] | Packed,
    bias: Float[Array, " O"] | None = None,
) -> Float[Array, "... O"]:
    """Compute `x @ w.T + bias` with float32 accumulation, returned in the dtype of `x`."""
    return linear_f32(x, w, bias).astype(x.dtype)
