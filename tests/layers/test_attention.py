"""Attention over several blocks is attention over their concatenation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.layers.attention import KeyBlock, OwnKey, attend, causal_mask

B, M, N, T, D, E = 2, 6, 2, 3, 5, 7


def arrays(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def block(seed, length, share=0.6):
    k, v = arrays(seed, (B, N, length, D), (B, N, length, E))
    mask = np.random.default_rng(seed + 100).random((B, T, length)) < share
    return KeyBlock(k, v, jnp.asarray(mask))


def plain(q, k, v, mask, scale):
    """Softmax attention head by head, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((B, T, M, v.shape[-1]))
    for b, m, t in np.ndindex(B, M, T):
        n = m // (M // N)
        seen = np.asarray(mask)[b, t]
        if not seen.any():
            continue
        scores = (k[b, n] @ q[b, m, t] * scale)[seen]
        weights = np.exp(scores - scores.max())
        out[b, t, m] = weights / weights.sum() @ v[b, n][seen]
    return out.reshape(B, T, -1)


@pytest.mark.parametrize("lengths", [(4,), (4, 3), (1, 6, 2)])
def test_blocks_equal_their_concatenation(lengths):
    (q,) = arrays(0, (B, M, T, D))
    blocks = [block(10 + i, n) for i, n in enumerate(lengths)]
    k, v = (jnp.concatenate([getattr(x, f) for x in blocks], 2) for f in ("k", "v"))
    mask = jnp.concatenate([x.mask for x in blocks], 2)
    want = plain(q, k, v, mask, 0.4)
    np.testing.assert_allclose(attend(q, blocks, 0.4), want, atol=2e-6)
    np.testing.assert_allclose(attend(q, [KeyBlock(k, v, mask)], 0.4), want, atol=2e-6)


def test_own_key_is_seen_by_its_query_alone():
    (q, k, v) = arrays(1, (B, M, T, D), (B, N, T, D), (B, N, T, E))
    shared = block(3, 4)
    diagonal = KeyBlock(k, v, jnp.eye(T, dtype=bool)[None])
    got = attend(q, [shared, OwnKey(k, v)], 0.3)
    np.testing.assert_allclose(got, attend(q, [shared, diagonal], 0.3), atol=2e-6)


def test_a_query_that_sees_nothing_gives_zeros():
    (q,) = arrays(2, (B, M, T, D))
    seen = block(4, 4, share=1.0)
    empty_row = KeyBlock(seen.k, seen.v, seen.mask.at[0, 1].set(False))
    got = attend(q, [empty_row, block(5, 2, share=0.0)], 1.0)
    assert np.all(np.asarray(got[0, 1]) == 0)
    others = jnp.ones((B, T), bool).at[0, 1].set(False)
    np.testing.assert_allclose(got[others], attend(q, [seen], 1.0)[others], atol=2e-6)


def test_what_is_masked_has_no_influence_whatever_it_holds():
    (q,) = arrays(6, (B, M, T, D))
    seen = block(7, 4)
    hidden = jnp.full((B, N, 2, D), 1e4), jnp.full((B, N, 2, E), 1e4)
    masked = KeyBlock(*hidden, jnp.zeros((1, 1, 2), bool))  # masks broadcast over rows
    np.testing.assert_array_equal(attend(q, [seen, masked], 1.0), attend(q, [seen], 1.0))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_gradient_is_finite_with_empty_rows(share):
    (q, k, v) = arrays(8, (B, M, T, D), (B, N, T, D), (B, N, T, E))
    mask = block(9, T, share).mask

    def total(q, k, v):
        return attend(q, [KeyBlock(k, v, mask)], 1.0).sum()

    for gradient in jax.grad(total, (0, 1, 2))(q, k, v):
        assert np.all(np.isfinite(gradient))
        assert share or np.all(np.asarray(gradient) == 0)


def test_large_scores_do_not_overflow_and_dtype_is_the_querys():
    q, k, v = arrays(9, (B, M, T, D), (B, N, T, D), (B, N, T, E))
    blocks = [KeyBlock(k.astype(jnp.bfloat16) * 300, v.astype(jnp.bfloat16), causal_mask(T))]
    got = attend(q.astype(jnp.bfloat16) * 300, blocks, 1.0)
    assert got.dtype == jnp.bfloat16 and np.all(np.isfinite(got.astype(jnp.float32)))


def test_causal_mask():
    np.testing.assert_array_equal(causal_mask(3)[0], np.tril(np.ones((3, 3), bool)))
