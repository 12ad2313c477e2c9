"""Products in the published `[out, in]` layout, accumulated in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
