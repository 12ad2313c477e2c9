"""The full cache: appends by row, never overruns, never clamps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.layers.cache import full

B, N, S, D, T = 3, 2, 8, 4, 5
write = jax.jit(full.write)


def filled(dtype="float32"):
    """A cache that holds -1 everywhere, to see what a write touches."""
    return jax.tree.map(lambda x: x - 1, full.empty(B, N, S, D, D + 1, dtype))


def new(seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=(B, N, T, d)), jnp.float32) for d in (D, D + 1))


@pytest.mark.parametrize(
    ("lengths", "n"),
    [
        ((0, 2, 3), (5, 3, 1)),
        ((0, 0, 0), (0, 0, 0)),
        ((3, 7, 8), (5, 5, 5)),  # the second and third row have less room than they ask for
        ((4, 6, 8), (0, 2, 0)),
    ],
)
def test_write_appends_the_first_n_and_touches_nothing_else(lengths, n):
    before, (k, v) = filled(), new()
    after = write(before, jnp.asarray(lengths), k, v, jnp.asarray(n))
    for got, rows in ((after.k, k), (after.v, v)):
        want = np.full(got.shape, -1.0, np.float32)
        for b in range(B):
            end = min(lengths[b] + n[b], S)
            want[b, :, lengths[b] : end] = rows[b, :, : end - lengths[b]]
        np.testing.assert_array_equal(got, want)


def test_write_casts_to_the_caches_dtype():
    k, v = new()
    after = write(filled("bfloat16"), jnp.zeros(B, int), k, v, jnp.full(B, T))
    assert after.k.dtype == jnp.bfloat16
    np.testing.assert_array_equal(after.k[:, :, :T], k.astype(jnp.bfloat16))


def test_visible_is_what_was_committed():
    mask = full.visible(filled(), jnp.asarray([0, 3, S]))
    assert mask.shape == (B, 1, S)
    np.testing.assert_array_equal(mask.sum((1, 2)), [0, 3, S])
    np.testing.assert_array_equal(mask[1, 0], np.arange(S) < 3)


def test_empty_has_separate_buffers_of_its_own_widths():
    cache = full.empty(B, N, S, D, D + 1, "bfloat16")
    assert cache.k.shape == (B, N, S, D) and cache.v.shape == (B, N, S, D + 1)
    assert cache.k.dtype == cache.v.dtype == jnp.bfloat16
