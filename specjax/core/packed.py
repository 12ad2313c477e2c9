"""Weights that stay quantised in memory, and are unpacked where a product needs them.

Each leaf type holds the tensors of one published layout as they are stored. They are pytrees:
stacked over layers or experts they go through `lax.scan`, `vmap` and indexing like any weight, and
their fields may as well be specs, shapes or shardings. Weights are `[out, in]`.

Unpacking multiplies in float32 and rounds once to the dtype asked for. Narrow floats are held as
bits: to take a layer or an expert out of a float8 or bfloat16 stack, XLA's CPU backend first
converts the whole stack to a wider float, in front of the loop. In an unrolled decode loop
XLA moves it in front of the loop, and all weights lie unpacked in memory after all; scan over
stacked packed weights instead (`layer_loop = "scan"`).
"""

from __future__ import annotations

import abc
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Int32, UInt8, UInt16

MX_GROUP = 32  # columns that share a scale in the OCP microscaling formats
_PER_WORD = 8  # 4-bit values in an int32


class Packed(abc.ABC):
    """What the packed leaf types have in common."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that is packed here: leading axes, out, in."""

    @abc.abstractmethod
    def dequantise(self, dtype: Any) -> Float[Array, "... O I"]:
        """Return the weight as an array of `dtype`."""

    def take(self, ids: Int[Array, "*ids"]) -> Self:
        """Select entries of the leading axis (experts), still packed.

        Args:
            ids: of any shape, which takes the place of the leading axis.
        """
        return jax.tree.map(lambda leaf: leaf[ids], self)

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory per weight, scales included."""
        leaves = jax.tree.leaves(self)
        stored = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
        return 8 * stored / math.prod(self.shape)


@struct.dataclass
class BlockFp8(Packed):
    """float8 weights with one scale per block of rows and columns.

    As DeepSeek and MiniMax publish them: `weight`, and `weight_scale_inv`, which despite its name
    is what the stored values are multiplied by. Blocks at the lower and right edges may be cut.

    Attributes:
        values: the bits of float8_e4m3fn, the weights divided by their scales.
        scale: `[..., ceil(O / rows), ceil(I / columns)]`.
        block: rows and columns that share a scale.
    """

    values: UInt8[Array, "*lead O I"]
    scale: Float[Array, "*lead R C"]
    block: tuple[int, int] = struct.field(pytree_node=False, default=(128, 128))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return tuple(self.values.shape)

    def dequantise(self, dtype: Any) -> Float[Array, "... O I"]:
        """Return the weight as an array of `dtype`."""
        rows, columns = self.shape[-2:]
        scale = jnp.repeat(self.scale.astype(jnp.float32), self.block[0], axis=-2)
        scale = jnp.repeat(scale[..., :rows, :], self.block[1], axis=-1)[..., :columns]
        values = jax.lax.bitcast_convert_type(self.values, jnp.float8_e4m3fn)
        return (values.astype(jnp.float32) * scale).astype(dtype)


@struct.dataclass
class GroupInt4(Packed):
    """Symmetric 4-bit integers with one scale per group of columns.

    `pack-quantized` of compressed-tensors: `weight_packed` holds eight values per int32, the first
    in the lowest bits, each raised by 8 to be unsigned; `weight_scale` one scale per group.

    Attributes:
        packed: `[..., O, I / 8]`.
        scale: `[..., O, I / group]`, floats or the bits of bfloat16; the group follows from the
            shapes.
    """

    packed: Int32[Array, "*lead O W"]
    scale: Float[Array, "*lead O G"] | UInt16[Array, "*lead O G"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *lead, words = self.packed.shape
        return (*lead, words * _PER_WORD)

    def dequantise(self, dtype: Any) -> Float[Array, "... O I"]:
        """Return the weight as an array of `dtype`."""
        shifts = jnp.arange(0, 4 * _PER_WORD, 4, dtype=jnp.int32)
        values = ((self.packed[..., None] >> shifts) & 15) - 8
        scale = self.scale
        if scale.dtype == jnp.uint16:
            scale = jax.lax.bitcast_convert_type(scale, jnp.bfloat16)
        return _scaled(values.reshape(self.shape).astype(jnp.float32), scale).astype(dtype)


@struct.dataclass
class Mxfp4(Packed):
    """OCP microscaling: e2m1 values, a power of two per 32 columns.

    As AMD Quark stores it: two values per byte, the even column in the low half, and a scale byte
    s that stands for 2^(s - 127); 255 is not a number.

    Attributes:
        packed: `[..., O, I / 2]`.
        scale: `[..., O, I / 32]`, exponents.
    """

    packed: UInt8[Array, "*lead O B"]
    scale: UInt8[Array, "*lead O G"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *lead, pairs = self.packed.shape
        return (*lead, pairs * 2)

    def dequantise(self, dtype: Any) -> Float[Array, "... O I"]:
        """Return the weight as an array of `dtype`."""
        codes = (self.packed[..., None] >> jnp.asarray([0, 4], jnp.uint8)) & 15
        values = _e2m1(codes.astype(jnp.int32).reshape(self.shape))
        return _scaled(values, _e8m0(self.scale)).astype(dtype)


def _scaled(values: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply groups of columns `[..., I]` by their scales `[..., I / group]`."""
    groups = values.reshape(*scale.shape, -1) * scale.astype(jnp.float32)[..., None]
    return groups.reshape(values.shape)


def _e2m1(codes: jax.Array) -> jax.Array:
    """Decode sign, two bits of exponent (bias 1), one of mantissa, from the top: 0 to 6.

    Arithmetic, because a table is a gather, which is slow on some devices; by way of twice the
    value, which is an integer.
    """
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    twice = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    magnitude = twice.astype(jnp.float32) * 0.5
    return jnp.where(codes >= 8, -magnitude, magnitude)


def _e8m0(exponents: jax.Array) -> jax.Array:
    """Return 2^(s - 127) by placing s where a float32 has its exponent.

    s = 0 gives zero: 2^-127 is subnormal, and XLA would flush it anyway.
    """
    powers = jax.lax.bitcast_convert_type(exponents.astype(jnp.int32) << 23, jnp.float32)
    return jnp.where(exponents == 255, jnp.nan, powers)


def is_packed(leaf: Any) -> bool:
    """Whether `leaf` is a packed weight."""
    return isinstance(leaf, Packed)


def dense(w: Any, dtype: Any) -> Float[Array, "*shape"]:
    """Return a weight, packed or not, as an array of `dtype`."""
    return w.dequantise(dtype) if is_packed(w) else w.astype(dtype)
