"""Rotary position embeddings: pair i of a head's dims turns by pos * inv_i.

Pairs are (i, i + r/2) in the half-split form, (2i, 2i + 1) in the interleaved one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.core.errors import CheckpointError

_KINDS = ("default", "llama3", "yarn", "linear", "proportional")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions turn queries and keys.

    Attributes:
        theta: base of the geometric frequencies.
        dims: number of rotated dims r, the first of each head; the rest pass unchanged.
        kind: "default", "llama3", "yarn", "linear" or "proportional" (Gemma 4: the slow part of
            the frequencies of the whole head is zero).
        scaling: the scaling's numbers as sorted (name, value) pairs.
    """

    theta: float
    dims: int
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        head_dim: int,
        default_theta: float = 10000.0,
        layer_type: str | None = None,
    ) -> RopeConfig:
        """Read both published spellings: `rope_parameters`, or `rope_theta` + `rope_scaling`.

        Args:
            config: the text model's fields.
            head_dim: size of the heads that are turned.
            default_theta: base where none is published.
            layer_type: key of this layer's entry where `rope_parameters` holds one per layer type
                ("full_attention", "sliding_attention"); no matter where all layers are alike.

        Raises:
            CheckpointError: the rope type is not one of those we compute, or does not fit.
        """
        rope = _published(config, layer_type)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _KINDS:
            known = ", ".join(_KINDS)
            raise CheckpointError(f"config.json: rope type {kind!r} is not supported; have {known}")
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or default_theta)
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        partial = 1.0 if partial is None else float(partial)
        if kind == "proportional":  # the factor says how many pairs of the whole head turn
            numbers = {"factor": float(rope.get("factor") or 1.0), "partial_rotary_factor": partial}
            return cls(theta, head_dim, kind, tuple(sorted(numbers.items())))
        dims = int(config.get("rotary_dim") or head_dim * partial)
        if dims % 2 or not 0 < dims <= head_dim:
            raise CheckpointError(
                f"config.json: cannot turn {dims} of {head_dim} dims of a head; an even number of"
                " them is needed"
            )
        if kind == "default":
            return cls(theta, dims)
        numbers = {
            name: float(value)
            for name, value in rope.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if "factor" not in numbers:
            raise CheckpointError(f"config.json: rope type {kind!r} needs a 'factor'")
        if trained := config.get("original_max_position_embeddings"):
            numbers["original_max_position_embeddings"] = float(trained)
        trained = config.get("max_position_embeddings", 0)
        numbers.setdefault("original_max_position_embeddings", float(trained))
        numbers.pop("rope_theta", None)
        if rope.get("truncate") is False:  # yarn's corner frequencies are not rounded then
            numbers["truncate"] = 0.0
        return cls(theta, dims, kind, tuple(sorted(numbers.items())))


def _published(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """Return the fields that describe the rope of one layer type, whatever their spelling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_type = {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    if not by_type:
        return rope
    have = ", ".join(sorted(by_type))
    if layer_type is None:
        raise CheckpointError(
            f"config.json: rope_parameters differ by layer type ({have}); one for all is needed"
        )
    if layer_type not in by_type:
        raise CheckpointError(f"config.json: rope_parameters lack {layer_type!r}; have {have}")
    return by_type[layer_type]


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return yarn's `1 + 0.1 scale ln factor` (arXiv 2309.00071), 1 where nothing is stretched."""
    return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0


def inverse_frequencies(config: RopeConfig) -> tuple[np.ndarray, float]:
    """Return (inv [r/2] float32, factor on cos and sin) for a rope configuration.

    Formulas of llama3 scaling, yarn (arXiv 2309.00071) and Gemma 4's proportional rope as
    transformers computes them.
    """
    r = config.dims
    inv = config.theta ** (-np.arange(0, r, 2, dtype=np.float64) / r)
    s = dict(config.scaling)
    if config.kind == "default":
        return inv.astype(np.float32), 1.0
    factor = s["factor"]
    if config.kind == "linear":
        return (inv / factor).astype(np.float32), 1.0
    if config.kind == "proportional":
        turning = int(s["partial_rotary_factor"] * r // 2)
        return np.where(np.arange(r // 2) < turning, inv / factor, 0).astype(np.float32), 1.0
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

    attention = s.get("attention_factor")
    if attention is None:
        if s.get("mscale") and s.get("mscale_all_dim"):
            attention = yarn_magnitude(factor, s["mscale"])
            attention /= yarn_magnitude(factor, s["mscale_all_dim"])
        else:
            attention = yarn_magnitude(factor)
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


def apply_rope_interleaved(
    x: Float[Array, "B N T D"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"]
) -> Float[Array, "B N T D"]:
    """Turn the pairs (2i, 2i + 1) of the first `2 R` dims; otherwise as `apply_rope`.

    The result has all first halves of the pairs, then all second ones: queries and keys turned
    here agree with each other, and no dims are woven back together.
    """
    turned = 2 * cos.shape[-1]
    parts = [x[..., 0:turned:2], x[..., 1:turned:2], x[..., turned:]]
    return apply_rope(jnp.concatenate(parts, axis=-1), cos, sin)
