"""Packed weights against the published layouts, and where they are unpacked."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.core.packed import BlockFp8, GroupInt4, Mxfp4, dense, is_packed
from specjax.core.params import ParamSpec
from specjax.layers.linear import linear

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quant"
RNG = np.random.default_rng(3)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


unpack = jax.jit(lambda w, dtype="float32": w.dequantise(dtype), static_argnums=1)


def e4m3(bits: np.ndarray) -> np.ndarray:
    """Decode sign, four bits of exponent (bias 7), three of mantissa; 7f and ff are not numbers."""
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    value = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    value = np.where(bits & 127 == 127, np.nan, value)
    return np.where(bits & 128, -value, value)


def random_fp8(*shape: int, block: tuple[int, int]) -> tuple[BlockFp8, np.ndarray]:
    """Return a weight and, worked out entry by entry, what it stands for."""
    *lead, rows, columns = shape
    bits = RNG.integers(0, 127, shape) | RNG.integers(0, 2, shape) << 7
    blocks = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    scale = RNG.uniform(0.1, 3, blocks).astype(np.float32)
    i, j = np.indices((rows, columns))
    want = e4m3(bits) * scale[..., i // block[0], j // block[1]].astype(np.float64)
    return BlockFp8(jnp.asarray(bits, jnp.uint8), jnp.asarray(scale), block), want


def random_int4(*shape: int, group: int) -> tuple[GroupInt4, np.ndarray]:
    *lead, rows, columns = shape
    values = RNG.integers(-8, 8, shape)
    scale = RNG.uniform(0.1, 3, (*lead, rows, columns // group)).astype(ml_dtypes.bfloat16)
    words = np.zeros((*lead, rows, columns // 8), np.uint64)
    for place in range(8):
        words |= (values[..., place::8] + 8).astype(np.uint64) << np.uint64(4 * place)
    want = values * np.repeat(scale.astype(np.float64), group, -1)
    packed = words.astype(np.uint32).view(np.int32)
    return GroupInt4(jnp.asarray(packed), jnp.asarray(scale.view(np.uint16))), want


def random_mxfp4(*shape: int) -> tuple[Mxfp4, np.ndarray]:
    *lead, rows, columns = shape
    codes = RNG.integers(0, 16, shape)
    scale = RNG.integers(110, 140, (*lead, rows, columns // 32))
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    want = np.asarray(E2M1)[codes] * np.repeat(2.0 ** (scale - 127), 32, -1)
    return Mxfp4(jnp.asarray(packed, jnp.uint8), jnp.asarray(scale, jnp.uint8)), want


def random_of(kind: str, *shape: int):
    if kind == "fp8":
        return random_fp8(*shape, block=(16, 32))
    return random_int4(*shape, group=32) if kind == "int4" else random_mxfp4(*shape)


KINDS = ["fp8", "int4", "mxfp4"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_values(kind, lead):
    weight, want = random_of(kind, *lead, 32, 64)
    assert weight.shape == want.shape
    assert is_packed(weight)
    got = unpack(weight)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want.astype(np.float32))
    half = unpack(weight, "bfloat16")
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, want.astype(np.float32).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("shape", [(33, 70), (2, 5, 31), (16, 32)])
def test_fp8_blocks_cut_at_the_edges(shape):
    weight, want = random_fp8(*shape, block=(16, 32))
    np.testing.assert_array_equal(unpack(weight), want.astype(np.float32))


def test_every_fp8_code():
    bits = np.arange(256).reshape(8, 32)
    weight = BlockFp8(jnp.asarray(bits, jnp.uint8), jnp.ones((1, 1)), (8, 32))
    np.testing.assert_array_equal(unpack(weight), e4m3(bits))


@pytest.mark.torch
def test_fp8_against_torch():
    torch = pytest.importorskip("torch")
    w = torch.randn(40, 72, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(3, 5) + 0.1
    spread = scale.repeat_interleave(16, 0)[:40].repeat_interleave(16, 1)[:, :72]
    stored = (w / spread).to(torch.float8_e4m3fn)
    weight = BlockFp8(
        jnp.asarray(stored.view(torch.uint8).numpy()), jnp.asarray(scale.numpy()), (16, 16)
    )
    want = stored.float() * spread
    np.testing.assert_array_equal(unpack(weight), want.numpy())
    np.testing.assert_array_equal(
        unpack(weight, "bfloat16").astype(jnp.float32), want.bfloat16().float().numpy()
    )


def test_int4_as_compressed_tensors_writes_it():
    stored = load_file(FIXTURES / "int4.safetensors")
    scale = stored["weight_scale"]
    for held in (scale.view(np.uint16), scale, scale.astype(np.float32)):
        weight = GroupInt4(jnp.asarray(stored["weight_packed"]), jnp.asarray(held))
        assert weight.shape == tuple(stored["weight_shape"])
        np.testing.assert_array_equal(unpack(weight, "bfloat16"), stored["expected"])


def test_mxfp4_as_quark_writes_it():
    stored = load_file(FIXTURES / "mxfp4.safetensors")
    weight = Mxfp4(jnp.asarray(stored["weight"]), jnp.asarray(stored["weight_scale"]))
    np.testing.assert_array_equal(unpack(weight), stored["expected"])
    np.testing.assert_array_equal(np.signbit(unpack(weight)), np.signbit(stored["expected"]))


@pytest.mark.parametrize(
    ("exponent", "want"), [(0, 0.0), (1, 2.0**-126), (127, 1.0), (254, 2.0**127), (255, np.nan)]
)
def test_mxfp4_scales_at_their_ends(exponent, want):
    """The code of 1.0 everywhere; a scale of 2^-127 is subnormal and counts as zero."""
    packed = jnp.full((1, 16), 0x22, jnp.uint8)
    weight = Mxfp4(packed, jnp.full((1, 1), exponent, jnp.uint8))
    np.testing.assert_array_equal(unpack(weight), np.full((1, 32), want))


@pytest.mark.parametrize(("kind", "want"), [("fp8", 8 + 32 / 512), ("int4", 4.5), ("mxfp4", 4.25)])
def test_bits_per_weight(kind, want):
    weight, _ = random_of(kind, 2, 32, 64)
    assert weight.bits_per_weight == want
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weight)
    assert shapes.bits_per_weight == want


@pytest.mark.parametrize("kind", KINDS)
def test_take_selects_and_stays_packed(kind):
    weight, want = random_of(kind, 5, 16, 32)
    ids = jnp.asarray([[4, 0, 4], [1, 2, 3]])
    taken = jax.jit(lambda w, ids: w.take(ids))(weight, ids)
    assert type(taken) is type(weight)
    assert taken.shape == (2, 3, 16, 32)
    np.testing.assert_array_equal(unpack(taken), want[ids].astype(np.float32))


def test_fields_may_be_specs():
    packed = ParamSpec((4, 16, 8), ("layers", "mlp", "embed"), "a.weight_packed", dtype="int32")
    scale = ParamSpec((4, 16, 2), ("layers", "mlp", "embed"), "a.weight_scale", dtype="uint16")
    leaf = GroupInt4(packed, scale)
    assert leaf.shape == (4, 16, 64)
    assert leaf == GroupInt4(packed, scale)


def test_dense_passes_arrays():
    w = jnp.ones((2, 3), jnp.bfloat16)
    assert not is_packed(w)
    assert dense(w, jnp.float32).dtype == jnp.float32


LAYERS, WIDTH = 8, 256


def decode_loop(weights, x, rounds, unpack_first=False):
    """Run `rounds` rounds of a stack of layers, as the engine's loop does."""

    def layer(x, w):
        return jnp.tanh(linear(x, w) / 64), None

    def round_(carry):
        x, left = carry
        return jax.lax.scan(layer, x, weights)[0], left - 1

    if unpack_first:
        weights = dense(weights, x.dtype)
    return jax.lax.while_loop(lambda carry: carry[1] > 0, round_, (x, rounds))[0]


def layers_of_temporaries(weights, dtype, **options) -> float:
    """Return the temporary memory of the compiled loop, in unpacked layers."""
    x = jnp.ones((2, WIDTH), dtype)
    run = jax.jit(lambda w, x, n: decode_loop(w, x, n, **options))
    memory = run.lower(weights, x, jnp.int32(3)).compile().memory_analysis()
    return memory.temp_size_in_bytes / (WIDTH * WIDTH * x.dtype.itemsize)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scanned_loop_unpacks_one_layer_at_a_time(kind):
    weights, _ = random_of(kind, LAYERS, WIDTH, WIDTH)
    assert layers_of_temporaries(weights, jnp.float32) < 1.1
    assert layers_of_temporaries(weights, jnp.bfloat16) < 1.1
    # The measure sees it when the whole stack is unpacked in front of the loop.
    assert layers_of_temporaries(weights, jnp.float32, unpack_first=True) >= LAYERS


@pytest.mark.parametrize("kind", KINDS)
def test_a_scanned_loop_computes_the_same(kind):
    weights, want = random_of(kind, 3, 32, 32)
    x = RNG.normal(size=(2, 32)).astype(np.float32)
    ref = x.astype(np.float64)
    for _ in range(2):
        for w in want:
            ref = np.tanh(ref @ w.T / 64)
    got = jax.jit(decode_loop)(weights, x, 2)
    np.testing.assert_allclose(got, ref, rtol=1e-4, atol=1e-6)
    assert np.abs(ref).max() > 1e-3
