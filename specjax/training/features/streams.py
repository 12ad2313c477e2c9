"""What is kept of a target per token: a few named vectors, in bfloat16 or float8.

All vectors of a token stand side by side, `[..., W]`, so that a text is one contiguous piece of a
file and texts are laid side by side by copying. Float8 (e4m3) has a float32 scale per token and
vector, the largest magnitude over 448, for the streams of a token differ by orders of magnitude.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Shaped

from specjax.core.errors import PairingError
from specjax.targets.base import Target, TargetInfo, TargetOut

_LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # 448
# Dtype of a number on disk; safetensors' numpy door knows no float8, so its bits are kept.
ON_DISK: Mapping[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8": np.dtype(np.uint8),
}


@dataclasses.dataclass(frozen=True)
class Stream:
    """One vector per token.

    Attributes:
        name: "tap i", "hidden", "keys i" or "values i".
        shape: of a token's part; `(N, D)` for keys and values.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """How many numbers it has per token."""
        return math.prod(self.shape)


def streams_of(info: TargetInfo, taps: Sequence[int], reads: Sequence[int]) -> tuple[Stream, ...]:
    """Return what is kept for heads that want these taps and keys; the final states always.

    Args:
        info: the target's facts.
        taps: residual streams, see `Target.forward`.
        reads: layers whose keys and values are read.

    Raises:
        PairingError: the target has no such residual stream, or no readable keys there.
    """
    if wrong := [tap for tap in taps if not 0 <= tap <= info.num_layers]:
        raise PairingError(f"the target has residual streams 0 to {info.num_layers}, not {wrong}")
    layers = dict(enumerate(info.key_layers))
    if wrong := [layer for layer in reads if layers.get(layer) is None]:
        raise PairingError(f"the target has no keys that a head can read in layers {wrong}")
    found = [Stream(f"tap {tap}", (info.hidden,)) for tap in sorted(set(taps))]
    found.append(Stream("hidden", (info.hidden,)))
    for index in sorted(set(reads)):
        layer = layers[index]
        assert layer is not None
        kind = layer.cache
        found.append(Stream(f"keys {index}", (kind.kv_heads, kind.k_dim)))
        found.append(Stream(f"values {index}", (kind.kv_heads, kind.v_dim)))
    return tuple(found)


def bytes_per_token(streams: Sequence[Stream], storage: str) -> int:
    """Return what a token takes on disk."""
    numbers = sum(stream.width for stream in streams)
    return numbers + 4 * len(streams) if storage == "fp8" else 2 * numbers


@struct.dataclass
class Stored:
    """The kept vectors of a batch (or of a text) as they lie on disk.

    Attributes:
        states: bfloat16, or the bits of float8_e4m3.
        scales: per token and stream; None for bfloat16.
        streams: what stands side by side in `states`.
    """

    states: Shaped[Array, "*rows W"]
    scales: Float[Array, "*rows P"] | None
    streams: tuple[Stream, ...] = struct.field(pytree_node=False)

    def read(self, name: str, dtype: Any) -> Float[Array, "*rows ..."]:
        """Return the vectors of one stream, each in its shape."""
        index = [stream.name for stream in self.streams].index(name)
        stream = self.streams[index]
        start = sum(before.width for before in self.streams[:index])
        part = self.states[..., start : start + stream.width]
        if self.scales is not None:
            bits = jax.lax.bitcast_convert_type(part, jnp.float8_e4m3fn)
            part = bits.astype(jnp.float32) * self.scales[..., index : index + 1]
        return part.astype(dtype).reshape(*part.shape[:-1], *stream.shape)

    def recall(
        self, taps: Sequence[int], reads: Sequence[int], dtype: Any
    ) -> tuple[jax.Array, jax.Array, tuple[tuple[jax.Array, jax.Array], ...]]:
        """Return (hidden `[B, S, H]`, taps `[n, B, S, H]`, keys) as a forward pass gives them."""
        hidden = self.read("hidden", dtype)
        found = [self.read(f"tap {tap}", dtype) for tap in taps]
        stacked = jnp.stack(found) if found else jnp.zeros((0, *hidden.shape), dtype)
        keys = tuple(
            (
                self.read(f"keys {layer}", dtype).swapaxes(1, 2),
                self.read(f"values {layer}", dtype).swapaxes(1, 2),
            )
            for layer in reads
        )
        return hidden, stacked, keys


def keep(target: Target, out: TargetOut, streams: tuple[Stream, ...], storage: str) -> Stored:
    """Return what is kept of a forward pass with `taps_of(streams)`.

    Args:
        target: the target that ran.
        out: its pass over `[B, S]` tokens.
        streams: what to keep.
        storage: bfloat16 or fp8.
    """
    layers = _numbers(streams, "keys")
    entries = target.entries(out.update, layers)
    values = dict(zip((f"tap {tap}" for tap in taps_of(streams)), out.taps, strict=True))
    values["hidden"] = out.hidden
    for layer, (k, v) in zip(layers, entries, strict=True):
        values |= {f"keys {layer}": k.swapaxes(1, 2), f"values {layer}": v.swapaxes(1, 2)}
    rows = out.hidden.shape[:2]
    parts = [values[stream.name].reshape(*rows, stream.width) for stream in streams]
    if storage == "bfloat16":
        return Stored(jnp.concatenate([p.astype(jnp.bfloat16) for p in parts], -1), None, streams)
    parts = [part.astype(jnp.float32) for part in parts]
    scales = jnp.stack([jnp.max(jnp.abs(part), -1) for part in parts], -1) / _LARGEST
    divisors = jnp.where(scales > 0, scales, 1)
    joined = jnp.concatenate([p / divisors[..., i, None] for i, p in enumerate(parts)], -1)
    bits = jax.lax.bitcast_convert_type(joined.astype(jnp.float8_e4m3fn), jnp.uint8)
    return Stored(bits, scales, streams)


def taps_of(streams: Sequence[Stream]) -> tuple[int, ...]:
    """Return the residual streams among what is kept."""
    return _numbers(streams, "tap")


def _numbers(streams: Sequence[Stream], kind: str) -> tuple[int, ...]:
    split = [stream.name.split() for stream in streams]
    return tuple(int(words[1]) for words in split if words[0] == kind)


def nothing(streams: tuple[Stream, ...], storage: str, shape: tuple[int, ...]) -> Stored:
    """Return zeros on the host for tokens of a shape, to be filled."""
    states = np.zeros((*shape, sum(stream.width for stream in streams)), ON_DISK[storage])
    scales = np.zeros((*shape, len(streams)), np.float32) if storage == "fp8" else None
    return Stored(states, scales, streams)  # type: ignore[arg-type]
