"""RMS norm: the formula, the dtype, the statistics' precision."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.layers.norm import rms_norm

X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
W = np.linspace(0.5, 2, 8, dtype=np.float32)


def test_formula_with_and_without_weight():
    want = X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(rms_norm(X, None, 1e-3), want, rtol=1e-6)
    np.testing.assert_allclose(rms_norm(X, W, 1e-3), want * W, rtol=1e-6)


def test_statistics_are_float32_whatever_comes_in():
    large = jnp.asarray(X * 1e3, jnp.float16)  # squares overflow float16
    got = rms_norm(large, None, 1e-6)
    assert got.dtype == jnp.float16 and np.all(np.isfinite(np.asarray(got, np.float32)))
    np.testing.assert_allclose(np.mean(np.square(got.astype(jnp.float32)), -1), 1, rtol=1e-2)


def test_zero_rows_have_a_finite_gradient():
    gradient = jax.grad(lambda x: rms_norm(x, W, 1e-6).sum())(jnp.zeros((1, 8)))
    assert np.all(np.isfinite(gradient))
