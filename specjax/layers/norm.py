"""Root-mean-square normalisation, statistics in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, " D"] | None, eps: float
) -> Float[Array, "... D"]:
    """Normalise the last axis: `weight * x / sqrt(mean(x^2) + eps)`, in the dtype of `x`.

    `weight=None` leaves the weight out. Families whose weight is an offset pass `1 + weight`.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # Rounded to the compute dtype before the weight, as the published models were trained.
    normed = (wide * scale).astype(x.dtype)
    return normed if weight is None else normed * weight.astype(x.dtype)
