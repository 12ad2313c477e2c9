"""The sliding-window cache: a ring that forgets what no query needs, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.layers.attention import KeyBlock, attend
from specjax.layers.cache.window import (
    WindowKind,
    slot_positions,
    slots_to_fill,
    window_block,
    window_mask,
)

B, N, W, D = 3, 2, 4, 3
KIND = WindowKind(kv_heads=N, k_dim=D, v_dim=D + 1, window=W)
write = jax.jit(KIND.write)
read = jax.jit(KIND.read)


def numbered(lengths, length, garbage_from=None):
    """Keys and values of new positions, each holding its own position; -1 from `garbage_from`."""
    at = np.asarray(lengths)[:, None] + np.arange(length)
    if garbage_from is not None:
        at = np.where(np.arange(length) < np.asarray(garbage_from)[:, None], at, -1)
    spread = np.broadcast_to(at[:, None, :, None], (B, N, length, D + 1)).astype(np.float32)
    return jnp.asarray(spread[..., :D]), jnp.asarray(-spread)


def test_slots_hold_the_last_positions():
    for length in range(12):
        held = slot_positions(jnp.asarray([length]), 4)[0]
        kept = [p for p in held.tolist() if p >= 0]
        assert sorted(kept) == list(range(max(0, length - 4), length))
        assert all(p % 4 == slot for slot, p in enumerate(held.tolist()))


@pytest.mark.parametrize("new", [1, 3, 4, 9])
def test_queries_see_exactly_their_window_of_what_was_committed(new):
    """Random commits, of more than a window too; what was not committed is garbage (-1)."""
    rng = np.random.default_rng(new)
    entry, lengths = KIND.empty(B, 64, "float32"), np.zeros(B, int)
    for _ in range(7):
        block = read(entry, jnp.asarray(lengths), jnp.asarray(lengths[:, None] + np.arange(new)))
        for b in range(B):
            for t in range(new):
                seen = np.asarray(block.mask[b, t])
                positions = np.asarray(block.k)[b, :, seen]
                query = lengths[b] + t
                want = [p for p in range(lengths[b]) if p > query - W]
                assert sorted(positions[:, 0, 0].astype(int).tolist()) == want
                assert np.all(positions == positions[:, :1, :1])
                np.testing.assert_array_equal(np.asarray(block.v)[b, :, seen][..., :D], -positions)
        n = rng.integers(0, new + 1, B)
        entry = write(entry, jnp.asarray(lengths), numbered(lengths, new, n), jnp.asarray(n))
        lengths = lengths + n


def test_write_touches_only_the_slots_it_fills():
    before = jax.tree.map(lambda x: x - 7, KIND.empty(B, 64, "float32"))
    lengths, n = jnp.asarray([3, 6, 2]), jnp.asarray([2, 0, 9])
    after = write(before, lengths, numbered(lengths, 9), n)
    want = [[4, -7, -7, 3], [-7, -7, -7, -7], [8, 9, 10, 7]]  # by hand: position p in slot p mod 4
    for head in range(N):
        np.testing.assert_array_equal(after.k[:, head, :, 0], want)


def test_no_two_positions_share_a_slot():
    """Not to be seen in the result on a CPU, which writes in order; other platforms need not."""
    for lengths, n in ((0, 0), (3, 4), (2, 9), (7, 5)):
        at = slots_to_fill(jnp.asarray([lengths]), jnp.asarray([n]), 9, 4)[0].tolist()
        assert len(set(at)) == 9
        inside = [slot for slot in at if slot < 4]
        assert inside == [(lengths + i) % 4 for i in range(max(0, n - 4), n)]


def full_pass(q, k, v):
    """Window attention over a whole text, in float64, query by query."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, m, i in np.ndindex(q.shape[:3]):
        n, first = m // (q.shape[1] // N), max(0, i - W + 1)
        scores = k[b, n, first : i + 1] @ q[b, m, i]
        weights = np.exp(scores - scores.max())
        out[b, m, i] = weights / weights.sum() @ v[b, n, first : i + 1]
    return out


@pytest.mark.parametrize(
    ("chunk", "dtype"), [(1, "float32"), (3, "float32"), (6, "float32"), (6, "bfloat16")]
)
def test_any_chunks_equal_one_pass(chunk, dtype):
    """Chunks longer than the window too; pads and rejected positions hold other numbers."""
    rng = np.random.default_rng(chunk)
    length, heads = 17, 2 * N
    kind = jnp.dtype(dtype)
    q, k, v = (
        rng.normal(size=(B, h, length, d)).astype(kind) for h, d in ((heads, D), (N, D), (N, D + 1))
    )
    want = full_pass(q, k, v)

    @jax.jit
    def step(entry, lengths, new, n):
        q, k, v = new
        positions = lengths[:, None] + jnp.arange(chunk)
        mask = window_mask(chunk, W)
        blocks = [KIND.read(entry, lengths, positions), KeyBlock(k, v, mask)]
        return attend(q, blocks, 1.0), KIND.write(entry, lengths, (k, v), n)

    entry, lengths = KIND.empty(B, length, dtype), np.zeros(B, int)
    while lengths.min() < length:
        n = np.minimum(rng.integers(0, chunk + 1, B), length - lengths)
        at = lengths[:, None] + np.arange(chunk)
        real = np.arange(chunk) < n[:, None]
        rows = np.arange(B)[:, None]

        def pick(x, at=at, real=real, rows=rows):
            rest = rng.normal(size=(B, chunk, x.shape[1], x.shape[3])).astype(kind)
            picked = x[rows, :, np.minimum(at, length - 1)]
            return np.where(real[..., None, None], picked, rest).transpose(0, 2, 1, 3)

        got, entry = step(entry, jnp.asarray(lengths), [pick(x) for x in (q, k, v)], jnp.asarray(n))
        got = np.asarray(got, np.float64).reshape(B, chunk, heads, -1)
        for b in range(B):
            rows_now = slice(lengths[b], lengths[b] + n[b])
            np.testing.assert_allclose(
                got[b, : n[b]],
                want[b, :, rows_now].transpose(1, 0, 2),
                atol=3e-6 if dtype == "float32" else 0.04,
            )
        lengths = lengths + n


def test_a_query_of_another_layer_may_choose_its_window():
    """The ring holds W keys; a query at the next position is shown the last of them it asks for."""
    lengths = jnp.asarray([9, 2, 0])
    entry = write(KIND.empty(B, 64, "float32"), jnp.zeros(B, int), numbered([0] * B, 9), lengths)
    block = window_block(entry, lengths, lengths[:, None], W + 1)
    np.testing.assert_array_equal(block.mask.sum((1, 2)), [4, 2, 0])
    np.testing.assert_array_equal(
        window_block(entry, lengths, lengths[:, None], 2).mask.sum((1, 2)), [1, 1, 0]
    )


def test_window_mask_is_its_definition():
    for length, window in ((1, 1), (5, 2), (3, 8)):
        mask = window_mask(length, window)
        assert mask.shape == (1, length, length)
        for i, j in np.ndindex(length, length):
            assert bool(mask[0, i, j]) == (i - window < j <= i)


def test_rings_are_no_longer_than_the_text_can_get():
    short = KIND.empty(B, 3, "bfloat16")
    assert short.k.shape == (B, N, 3, D) and short.v.shape == (B, N, 3, D + 1)
    filled = write(short, jnp.zeros(B, int), numbered([0] * B, 3), jnp.asarray([3, 2, 0]))
    block = read(filled, jnp.asarray([3, 2, 0]), jnp.asarray([[3], [2], [0]]))
    np.testing.assert_array_equal(block.mask.sum((1, 2)), [3, 2, 0])


def test_bytes_are_those_of_the_buffers():
    entry = KIND.empty(1, 64, "bfloat16")
    assert KIND.bytes_fixed(2) == sum(leaf.nbytes for leaf in jax.tree.leaves(entry))
    assert KIND.bytes_per_token(2) == 0 and KIND.name == "window"
