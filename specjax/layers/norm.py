"""Root-mean-square normalisation, statistics in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, " D"] | None, eps: float
) -> Float[Array, "... D"]:
    """Normalise the last axis: `weight * x / sqrt(mean(x^2) + eps)`, in the dtype of `x`.

    `weight=None` leaves the weight out.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # Rounded to the compute dtype before the weight, as the published models were trained.
    normed = (wide * scale).astype(x.dtype)
    return normed if weight is None else normed * weight.astype(x.dtype)


def offset_norm(
    x: Float[Array, "... D"], offset: Float[Array, " D"], eps: float
) -> Float[Array, "... D"]:
    """Normalise with the weight `1 + offset`, in float32 throughout; returned as `x.dtype`.

    In bfloat16 `1 + offset` would keep two digits of what was trained.
    """
    weight = 1 + offset.astype(jnp.float32)
    return rms_norm(x.astype(jnp.float32), weight, eps).astype(x.dtype)
