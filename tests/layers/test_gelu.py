"""The tanh form of GELU against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.layers.gelu import gelu_tanh


def exact(x):
    x = np.asarray(x, np.float64)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("dtype", "relative"), [("float32", 2e-6), ("bfloat16", 2**-8)], ids=["float32", "bfloat16"]
)
def test_it_keeps_its_relative_accuracy_where_the_sum_would_cancel(dtype, relative):
    x = jnp.linspace(-5, 8, 3001).astype(dtype)
    got = jax.jit(gelu_tanh)(x)
    assert got.dtype == x.dtype
    want = exact(x)
    away = np.abs(want) > 1e-5  # nearer to zero sigmoid's own exponential is what rounds
    error = np.abs(np.asarray(got, np.float64) - want)
    assert (error[away] <= relative * np.abs(want[away])).all()
    assert error.max() < 8 * relative


def test_it_is_not_the_exact_gelu():
    """They are furthest apart, by 4.7e-4, where |x| is about 2.3."""
    x = jnp.float32(-2.3)
    assert abs(float(gelu_tanh(x)) - float(jax.nn.gelu(x, approximate=False))) > 2e-4


def test_large_arguments_stay_finite_in_value_and_gradient():
    x = jnp.asarray([-1e4, -30.0, 0.0, 30.0, 1e4])
    np.testing.assert_allclose(gelu_tanh(x), [0, 0, 0, 30, 1e4], atol=1e-6)
    slopes = jax.vmap(jax.grad(gelu_tanh))(x)
    np.testing.assert_allclose(slopes, [0, 0, 0.5, 1, 1], atol=1e-6)
