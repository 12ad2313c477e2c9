"""The latent cache: appends by row, one buffer for keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.layers.attention import attend
from specjax.layers.cache.latent import LatentKind

B, S, R, P, T = 3, 8, 5, 2, 4
KIND = LatentKind(rank=R, rope_dim=P)
write = jax.jit(KIND.write)


def new(seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, R + P)), jnp.float32)


@pytest.mark.parametrize(
    ("lengths", "n"),
    [
        ((0, 2, 3), (4, 3, 1)),
        ((0, 5, 8), (0, 0, 0)),
        ((5, 7, 8), (4, 4, 4)),  # all three rows have less room than they ask for
    ],
)
def test_write_appends_the_first_n_and_touches_nothing_else(lengths, n):
    before = jax.tree.map(lambda x: x - 1, KIND.empty(B, S, "float32"))
    rows = new()
    after = write(before, jnp.asarray(lengths), rows, jnp.asarray(n))
    want = np.full((B, S, R + P), -1.0, np.float32)
    for b in range(B):
        end = min(lengths[b] + n[b], S)
        want[b, lengths[b] : end] = rows[b, : end - lengths[b]]
    np.testing.assert_array_equal(after.latent, want)


def test_write_casts_to_the_caches_dtype():
    after = write(KIND.empty(B, S, "bfloat16"), jnp.zeros(B, int), new(), jnp.full(B, T))
    np.testing.assert_array_equal(after.latent[:, :T], new().astype(jnp.bfloat16))


def test_a_sum_of_values_begins_with_the_sum_of_latents():
    """Scores of latent and rope key together, values the latents alone, in float64."""
    lengths = jnp.asarray([4, 1, 3])
    entry = write(KIND.empty(B, S, "float32"), jnp.zeros(B, int), new(), lengths)
    heads, queries = 3, 2
    q = jnp.asarray(np.random.default_rng(1).normal(size=(B, heads, queries, R + P)), jnp.float32)
    block = KIND.read(entry, lengths, lengths[:, None] + jnp.arange(queries))
    got = attend(q, [block], 0.5).reshape(B, queries, heads, R + P)[..., :R]
    for b, m, t in np.ndindex(B, heads, queries):
        cached = np.asarray(new()[b, : lengths[b]], np.float64)
        c, r = cached[:, :R], cached[:, R:]
        query = np.asarray(q[b, m, t], np.float64)
        scores = 0.5 * (c @ query[:R] + r @ query[R:])
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(got[b, t, m], weights / weights.sum() @ c, atol=3e-6)


def test_bytes_are_those_of_the_buffer():
    nbytes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(KIND.empty(1, s, "bfloat16"))) for s in (8, 9)
    ]
    assert KIND.bytes_per_token(2) == nbytes[1] - nbytes[0] == (R + P) * 2
    assert KIND.bytes_fixed(2) == 0 and KIND.name == "latent"
