"""The recurrent cache: committing n tokens is doing n steps, and nothing else leaves a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.layers.cache.recurrent import RecurrentCache, RecurrentKind, RecurrentUpdate

B, N, M, D, E, K, T = 3, 2, 4, 5, 6, 4, 7
KIND = RecurrentKind(key_heads=N, value_heads=M, key_dim=D, value_dim=E, conv_kernel=K)
write = jax.jit(lambda entry, new, n: KIND.write(entry, jnp.zeros_like(n), new, n))


def entry(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    state = rng.normal(size=(B, M, D, E))
    tail = rng.normal(size=(B, K - 1, KIND.channels))
    return RecurrentCache(jnp.asarray(state, np.float32), jnp.asarray(tail, dtype))


def update(seed=1, length=T):
    rng = np.random.default_rng(seed)
    return RecurrentUpdate(
        k=jnp.asarray(rng.normal(size=(B, N, length, D)), np.float32),
        w=jnp.asarray(rng.normal(size=(B, M, length, E)), np.float32),
        log_decay=jnp.asarray(-np.exp(rng.normal(size=(B, M, length))), np.float32),
        u=jnp.asarray(rng.normal(size=(B, length, KIND.channels)), np.float32),
    )


def step_by_step(cache, new, n):
    """Do one token after the other in float64."""
    state, tail, k, w, log_decay, u = (
        np.array(x, np.float64)
        for x in (cache.state, cache.tail, new.k, new.w, new.log_decay, new.u)
    )
    for b in range(B):
        for t in range(n[b]):
            for m in range(M):
                outer = np.outer(k[b, m // (M // N), t], w[b, m, t])
                state[b, m] = np.exp(log_decay[b, m, t]) * state[b, m] + outer
            tail[b] = np.concatenate([tail[b, 1:], u[b, t : t + 1]])
    return state, tail


def check(got, want):
    np.testing.assert_allclose(got.state, want[0], atol=2e-6)
    np.testing.assert_array_equal(got.tail, want[1].astype(np.float32))


@pytest.mark.parametrize("n", [(0, 1, 2), (3, 4, 7), (5, 6, 0)])
def test_a_commit_is_n_steps(n):
    check(write(entry(), update(), jnp.asarray(n)), step_by_step(entry(), update(), n))


@pytest.mark.parametrize("length", [1, 2])
def test_fewer_tokens_than_taps(length):
    n = (length, 0, length)
    new = update(length=length)
    check(write(entry(), new, jnp.asarray(n)), step_by_step(entry(), new, n))


def test_nothing_committed_changes_no_bit():
    before = entry()
    after = write(before, update(), jnp.zeros(B, int))
    np.testing.assert_array_equal(after.state, before.state)
    np.testing.assert_array_equal(after.tail, before.tail)


def test_what_is_not_committed_leaves_no_trace():
    new, n = update(), np.array([2, 0, 5])
    behind = jnp.arange(T)[None] >= n[:, None]
    garbage = RecurrentUpdate(
        k=jnp.where(behind[:, None, :, None], 1e3, new.k),
        w=jnp.where(behind[:, None, :, None], jnp.nan, new.w),
        log_decay=jnp.where(behind[:, None], jnp.nan, new.log_decay),
        u=jnp.where(behind[..., None], jnp.nan, new.u),
    )
    want, got = write(entry(), new, jnp.asarray(n)), write(entry(), garbage, jnp.asarray(n))
    np.testing.assert_array_equal(got.state, want.state)
    np.testing.assert_array_equal(got.tail, want.tail)


def test_two_commits_are_one():
    new = update()
    first = RecurrentUpdate(new.k[:, :, :4], new.w[:, :, :4], new.log_decay[..., :4], new.u[:, :4])
    rest = RecurrentUpdate(new.k[:, :, 4:], new.w[:, :, 4:], new.log_decay[..., 4:], new.u[:, 4:])
    split = write(write(entry(), first, jnp.full(B, 4)), rest, jnp.full(B, T - 4))
    check(split, step_by_step(entry(), new, (T,) * B))


def test_mild_decays_keep_their_digits_behind_strong_ones():
    """Differences of sums from the start would be off by 1e-3 here."""
    length = 64
    new = update(length=length)
    strong = jnp.arange(length) < 50
    new = new.replace(log_decay=jnp.where(strong, -300.0, -0.01 + 0.001 * new.log_decay))
    n = (length, 60, 52)
    got, want = write(entry(), new, jnp.asarray(n)), step_by_step(entry(), new, n)
    assert np.abs(want[0]).max() > 1
    np.testing.assert_allclose(got.state, want[0], atol=5e-6)


def test_empty_is_zeros_with_a_float32_state_whatever_the_dtype():
    for dtype in ("float32", "bfloat16"):
        cache = KIND.empty(B, 1000, dtype)
        assert cache.state.shape == (B, M, D, E) and cache.state.dtype == jnp.float32
        assert cache.tail.shape == (B, K - 1, 2 * N * D + M * E) and cache.tail.dtype == dtype
        assert not cache.state.any() and not cache.tail.any()


def test_the_tail_keeps_its_dtype():
    after = write(entry(dtype=jnp.bfloat16), update(), jnp.asarray([1, 5, 0]))
    assert after.tail.dtype == jnp.bfloat16 and after.state.dtype == jnp.float32
    np.testing.assert_array_equal(after.tail[1], update().u[1, 2:5].astype(jnp.bfloat16))


def test_memory_is_what_the_entry_takes_and_does_not_grow():
    assert KIND.bytes_per_token(2) == 0
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        assert KIND.bytes_fixed(itemsize) == sum(
            leaf.nbytes for leaf in jax.tree.leaves(KIND.empty(1, 8, dtype))
        )


def test_equal_kinds_are_one_static_argument():
    twin = RecurrentKind(N, M, D, E, K)
    assert twin == KIND and hash(twin) == hash(KIND) and KIND.name == "recurrent"
