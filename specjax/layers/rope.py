"""Rotary position embeddings in the half-split form: pair (i, i + r/2) turns by pos * inv_i."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.core.errors import CheckpointError

_KINDS = ("default", "llama3", "yarn", "linear")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions turn queries and keys.

    Attributes:
        theta: base of the geometric frequencies.
        dims: number of rotated dims r, the first of each head; the rest pass unchanged.
        kind: "default", "llama3", "yarn" or "linear".
        scaling: the scaling's numbers as sorted (name, value) pairs.
    """

    theta: float
    dims: int
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], head_dim: int, default_theta: float = 10000.0
    ) -> RopeConfig:
        """Read both published spellings: `rope_parameters`, or `rope_theta` + `rope_scaling`.

        Raises:
            CheckpointError: the rope type is not one of those we compute.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _KINDS:
            known = ", ".join(_KINDS)
            raise CheckpointError(f"config.json: rope type {kind!r} is not supported; have {known}")
        theta = rope.get("rope_theta") or config.get("rope_theta") or default_theta
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        dims = config.get("rotary_dim") or int(head_dim * partial)
        numbers = {
            name: float(value)
            for name, value in rope.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        numbers.setdefault(
            "original_max_position_embeddings", float(config.get("max_position_embeddings", 0))
        )
        numbers.pop("rope_theta", None)
        if rope.get("truncate") is False:  # yarn's corner frequencies are not rounded then
            numbers["truncate"] = 0.0
        scaling = () if kind == "default" else tuple(sorted(numbers.items()))
        if kind != "default" and "factor" not in numbers:
            raise CheckpointError(f"config.json: rope type {kind!r} needs a 'factor'")
        return cls(theta=float(theta), dims=int(dims), kind=kind, scaling=scaling)


def inverse_frequencies(config: RopeConfig) -> tuple[np.ndarray, float]:
    """Return (inv [r/2] float32, factor on cos and sin) for a rope configuration.

    Formulas of llama3 scaling and yarn (arXiv 2309.00071) as transformers computes them.
    """
    r = config.dims
    inv = config.theta ** (-np.arange(0, r, 2, dtype=np.float64) / r)
    s = dict(config.scaling)
    if config.kind == "default":
        return inv.astype(np.float32), 1.0
    factor = s["factor"]
    if config.kind == "linear":
        return (inv / factor).astype(np.float32), 1.0
    length = s["original_max_position_embeddings"]
    if config.kind == "llama3":
        low, high = s.get("low_freq_factor", 1.0), s.get("high_freq_factor", 4.0)
        wave = 2 * math.pi / inv
        smooth = (length / wave - low) / (high - low)
        between = inv * (smooth + (1 - smooth) / factor)
        scaled = np.where(wave > length / low, inv / factor, between)
        return np.where(wave < length / high, inv, scaled).astype(np.float32), 1.0

    def boundary(turns: float) -> float:
        return r * math.log(length / (2 * math.pi * turns)) / (2 * math.log(config.theta))

    low, high = boundary(s.get("beta_fast", 32.0)), boundary(s.get("beta_slow", 1.0))
    if s.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    ramp = np.clip((np.arange(r // 2) - low) / ((high - low) or 0.001), 0, 1)
    inv = inv * (1 - ramp + ramp / factor)

    def magnitude(scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0

    attention = s.get("attention_factor")
    if attention is None:
        if s.get("mscale") and s.get("mscale_all_dim"):
            attention = magnitude(s["mscale"]) / magnitude(s["mscale_all_dim"])
        else:
            attention = magnitude(1.0)
    return inv.astype(np.float32), float(attention)


def rope_tables(
    config: RopeConfig, positions: Int[Array, ...]
) -> tuple[Float[Array, "... R"], Float[Array, "... R"]]:
    """Compute (cos, sin), each `[..., dims / 2]` float32, at integer `positions`."""
    inv, factor = inverse_frequencies(config)
    angles = positions[..., None].astype(jnp.float32) * inv
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: Float[Array, "B N T D"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"]
) -> Float[Array, "B N T D"]:
    """Turn the first `2 R` dims of each head; computed in float32, returned as `x.dtype`."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    wide = x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :]]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
