"""Products in the published `[out, in]` layout, accumulated in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.packed import BlockFp8, GroupInt4, Mxfp4
from specjax.layers.linear import linear, linear_f32

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(24, 64)), jnp.float32)
BIAS = jnp.asarray(RNG.normal(size=24), jnp.float32)
X = jnp.asarray(RNG.normal(size=(2, 3, 64)), jnp.float32)


def test_formula_and_dtypes():
    want = np.asarray(X, np.float64) @ np.asarray(W, np.float64).T
    np.testing.assert_allclose(linear(X, W), want, atol=2e-5)
    np.testing.assert_allclose(linear(X, W, BIAS), want + np.asarray(BIAS), atol=2e-5)
    half = X.astype(jnp.bfloat16)
    assert linear(half, W).dtype == jnp.bfloat16
    assert linear_f32(half, W, BIAS.astype(jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_single_bfloat16_row_gives_what_it_gives_beside_another(shape, compiled):
    run = jax.jit(linear_f32) if compiled else linear_f32
    w, rows = W.astype(jnp.bfloat16), X[0, :2].astype(jnp.bfloat16)
    alone = run(rows[0].reshape(shape), w)
    assert alone.shape == (*shape[:-1], 24)
    np.testing.assert_array_equal(alone.reshape(-1), run(rows, w)[0])


def test_accumulation_is_float32():
    """4096 times 1 + 1/256 in bfloat16 inputs: a bfloat16 sum would stop growing at 256."""
    x = jnp.ones((2, 4096), jnp.bfloat16)
    w = jnp.ones((1, 4096), jnp.bfloat16)
    assert float(linear_f32(x, w)[0, 0]) == 4096.0


def test_gradient_passes_the_single_row_form():
    x, w = X[0, :1].astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    got = jax.grad(lambda w: linear_f32(x, w).sum())(w)
    np.testing.assert_allclose(got.astype(jnp.float32), np.tile(x.astype(jnp.float32), (24, 1)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_weights_give_what_their_unpacked_ones_give(dtype):
    packed = [
        BlockFp8(RNG.integers(0, 127, (24, 64)).astype(np.uint8), np.ones((1, 2), "f4"), (32, 32)),
        GroupInt4(RNG.integers(0, 1 << 30, (24, 8)).astype(np.int32), np.full((24, 2), 0.1, "f4")),
        Mxfp4(*(RNG.integers(118, 124, (24, n)).astype(np.uint8) for n in (32, 2))),
    ]
    x, run = X.astype(dtype), jax.jit(linear)
    for w in packed:
        w = jax.tree.map(jnp.asarray, w)
        assert run(x, w, BIAS).dtype == dtype
        np.testing.assert_array_equal(run(x, w, BIAS), run(x, w.dequantise(dtype), BIAS))
        want = np.asarray(x, np.float64) @ np.asarray(w.dequantise("float32"), np.float64).T
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        got = np.asarray(linear_f32(x, w), np.float64)
        np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max())
