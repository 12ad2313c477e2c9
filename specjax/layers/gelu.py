"""GELU in its tanh form, as Gemma's gates use it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_SLOPE = 2 * math.sqrt(2 / math.pi)


def gelu_tanh(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute `x / 2 (1 + tanh u)`, `u = sqrt(2 / pi) (x + 0.044715 x^3)` (arXiv 1606.08415).

    In float32, returned in the dtype of `x`, and as `x sigmoid(2 u)`, which is the same: 1 + tanh u
    cancels for negative x, in bfloat16 down to the last bit.
    """
    wide = x.astype(jnp.float32)
    inner = _SLOPE * wide * (1 + 0.044715 * wide * wide)
    return (wide * jax.nn.sigmoid(inner)).astype(x.dtype)
