"""Attention over several blocks is attention over their concatenation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import ConfigError
from specjax.layers.attention import KeyBlock, OwnKey, attend_with, causal_mask

B, M, N, T, D, E = 2, 6, 2, 3, 5, 7


@pytest.fixture(params=["blocks", "dot_product"])
def attend(request):
    return jax.jit(attend_with(request.param), static_argnums=2)


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
def test_blocks_equal_their_concatenation(attend, lengths):
    (q,) = arrays(0, (B, M, T, D))
    blocks = [block(10 + i, n) for i, n in enumerate(lengths)]
    k, v = (jnp.concatenate([getattr(x, f) for x in blocks], 2) for f in ("k", "v"))
    mask = jnp.concatenate([x.mask for x in blocks], 2)
    want = plain(q, k, v, mask, 0.4)
    np.testing.assert_allclose(attend(q, blocks, 0.4), want, atol=2e-6)
    np.testing.assert_allclose(attend(q, [KeyBlock(k, v, mask)], 0.4), want, atol=2e-6)


def test_own_key_is_seen_by_its_query_alone(attend):
    (q, k, v) = arrays(1, (B, M, T, D), (B, N, T, D), (B, N, T, E))
    shared = block(3, 4)
    diagonal = jnp.broadcast_to(jnp.eye(T, dtype=bool), (B, T, T))
    both_k, both_v = jnp.concatenate([shared.k, k], 2), jnp.concatenate([shared.v, v], 2)
    want = plain(q, both_k, both_v, jnp.concatenate([shared.mask, diagonal], 2), 0.3)
    np.testing.assert_allclose(attend(q, [shared, OwnKey(k, v)], 0.3), want, atol=2e-6)
    np.testing.assert_allclose(
        attend(q, [OwnKey(k, v), shared], 0.3), want, atol=2e-6, err_msg="own key first"
    )


def test_keys_wider_than_values(attend):
    q, k, v = arrays(11, (B, M, T, E), (B, N, 4, E), (B, N, 4, D))
    mask = block(12, 4).mask
    got = attend(q, [KeyBlock(k, v, mask)], 0.3)
    np.testing.assert_allclose(got, plain(q, k, v, mask, 0.3), atol=2e-6)


def test_a_query_that_sees_nothing_gives_zeros(attend):
    (q,) = arrays(2, (B, M, T, D))
    seen = block(4, 4, share=1.0)
    empty_row = KeyBlock(seen.k, seen.v, seen.mask.at[0, 1].set(False))
    got = attend(q, [empty_row, block(5, 2, share=0.0)], 1.0)
    assert np.all(np.asarray(got[0, 1]) == 0)
    others = jnp.ones((B, T), bool).at[0, 1].set(False)
    np.testing.assert_allclose(got[others], attend(q, [seen], 1.0)[others], atol=2e-6)


def test_what_is_masked_has_no_influence_whatever_it_holds(attend):
    (q,) = arrays(6, (B, M, T, D))
    seen = block(7, 4)

    def beside(value):  # masks broadcast over rows and queries
        k, v = jnp.full((B, N, 2, D), value), jnp.full((B, N, 2, E), value)
        return attend(q, [seen, KeyBlock(k, v, jnp.zeros((1, 1, 2), bool))], 1.0)

    np.testing.assert_array_equal(beside(1e4), beside(0.0))
    np.testing.assert_allclose(beside(1e4), attend(q, [seen], 1.0), atol=2e-6)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_gradient_is_finite_with_empty_rows(attend, share):
    (q, k, v) = arrays(8, (B, M, T, D), (B, N, T, D), (B, N, T, E))
    mask = block(9, T, share).mask

    def total(q, k, v):
        return attend(q, [KeyBlock(k, v, mask)], 1.0).sum()

    for gradient in jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v):
        assert np.all(np.isfinite(gradient))
        assert share or np.all(np.asarray(gradient) == 0)


def test_large_scores_do_not_overflow_and_dtype_is_the_querys(attend):
    q, k, v = arrays(9, (B, M, T, D), (B, N, T, D), (B, N, T, E))
    blocks = [KeyBlock(k.astype(jnp.bfloat16) * 300, v.astype(jnp.bfloat16), causal_mask(T))]
    got = attend(q.astype(jnp.bfloat16) * 300, blocks, 1.0)
    assert got.dtype == jnp.bfloat16 and np.all(np.isfinite(got.astype(jnp.float32)))


def test_causal_mask():
    np.testing.assert_array_equal(causal_mask(3)[0], np.tril(np.ones((3, 3), bool)))


def test_bfloat16_keys_under_a_float32_query(attend):
    q, k, v = arrays(13, (B, M, T, D), (B, N, 4, D), (B, N, 4, E))
    q, k, v = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v))
    mask = block(14, 4).mask
    got = attend(q, [KeyBlock(k.astype(jnp.bfloat16), v.astype(jnp.bfloat16), mask)], 0.3)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain(q, k, v, mask, 0.3), atol=0.03)


def test_back_ends_agree_on_gradients():
    q, k, v = arrays(15, (B, M, T, D), (B, N, T, D), (B, N, T, E))
    shared = block(16, 4, share=0.3)

    def gradients(backend):
        def total(q, k, v):
            out = attend_with(backend)(q, [shared, OwnKey(k, v)], 0.7)
            return (out * jnp.arange(out.size).reshape(out.shape)).sum()

        return jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v)

    for one, other in zip(gradients("blocks"), gradients("dot_product"), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def test_float32_products_of_both_back_ends_have_their_precision_stated(attend):
    q, k, v = arrays(17, (B, M, T, D), (B, N, T, D), (B, N, T, E))
    masked = causal_mask(T)
    run = jax.jit(lambda q, k, v: attend(q, [KeyBlock(k, v, masked)], 1.0))
    program = run.lower(q, k, v).as_text()
    products = program.count("stablehlo.dot_general")
    assert products == 2 and program.count("precision = [HIGHEST, HIGHEST]") == products


def test_what_a_back_end_does_not_do_is_refused():
    with pytest.raises(ConfigError, match=r"attention 'flash' does not exist; have 'blocks', 'dot"):
        attend_with("flash")
    q, k, v = arrays(18, (B, M, T, D), (B, N, T, D), (B, N, T, E))
    for kind in ("float16", "float8_e4m3fn"):
        small = [x.astype(kind) for x in (k, v)]
        with pytest.raises(TypeError, match=rf"takes float32 or bfloat16, not {kind}"):
            attend_with("dot_product")(q, [KeyBlock(*small, causal_mask(T))], 1.0)
