"""`verify` with its keys: statistics over many draws, mixed batches, independence of rows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from specjax.layers.sampling import PURPOSE_DRAFT, PURPOSE_NEXT, Sampling, draw, processed_probs
from specjax.verify import greedy, verify

compiled = jax.jit(verify)


def judge(*batch):
    """`verify` on numpy arrays, compiled once per shape (weak types would compile again)."""
    return jax.tree.map(np.asarray, compiled(*jax.tree.map(np.asarray, batch)))


N = 100_000
PAD = 8


@functools.partial(jax.jit, static_argnames="certain")
def first_tokens(target, draft, temperature, certain):
    """First emitted token of N rounds with one draft each; logits are those of one row.

    A certain draft is the drafter's argmax.
    """
    sampling = Sampling.of(N, temperature, seed=jnp.arange(N))
    zero = jnp.zeros(N, jnp.int32)
    tokens, probs = draw(jnp.tile(draft, (N, 1)), sampling, zero, PURPOSE_DRAFT)
    probs = probs[:, None]
    if certain:
        tokens, probs = jnp.full(N, jnp.argmax(draft), jnp.int32), None
    logits = jnp.tile(target, (N, 2, 1))
    return verify(logits, tokens[:, None], probs, zero + 1, sampling, zero).tokens[:, 0]


CASES = {
    "F42": ([0.11, -1.3, 2.07, 0.5, -0.77, 1.9, -2.6, 1.01], [1, 0, 1.5, -1, 0.3, 2, -2, 0.2], 1.0),
    "F43": (np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.2, 0.6]), 0.8),
    "F44-cold": ([1.0, 0.2, -0.5, 0.0], [0.0, 1.0, 0.5, -1.0], 0.5),
    "F44-hot": ([1.0, 0.2, -0.5, 0.0], [0.0, 1.0, 0.5, -1.0], 2.0),
    "F45": (np.log([0.6, 0.4]), np.log([0.9, 0.1]), 1.0),
}


@pytest.mark.parametrize(
    ("case", "certain"), [(c, False) for c in CASES] + [(c, True) for c in CASES if c != "F42"]
)
def test_first_token_follows_the_target(case, certain):
    """100k rounds: chi-square and 4 sigma against softmax(target / T), in float64.

    F43 also asks for `certain`: a greedy drafter is a point mass.
    """
    target, draft, temperature = CASES[case]
    size = len(target)
    dtype = jnp.bfloat16 if case == "F42" else jnp.float32
    target, draft = (
        jnp.full(PAD, -jnp.inf, dtype).at[:size].set(jnp.asarray(x, dtype)) for x in (target, draft)
    )
    tokens = first_tokens(target, draft, temperature, certain)
    p = np.exp(np.asarray(target, np.float64) / temperature)
    p /= p.sum()
    counts = np.bincount(tokens, minlength=PAD)
    assert not counts[size:].any()
    assert chisquare(counts[:size], p[:size] * N).pvalue > 1e-4
    assert (np.abs(counts / N - p) <= 4 * np.sqrt(p * (1 - p) / N)).all()
    if case == "F45":
        assert abs(counts[0] / N - 0.6) < 0.005


def test_three_tokens_over_several_rounds():
    """Joint law of (x0, x1, x2): rounds follow each other with positions as the engine's.

    A position drafted, rejected and drafted again must not remember its first noise.
    """
    n, drafts, vocab = 100_000, 2, 3
    rng = np.random.default_rng(3)
    table_p, table_q = (jnp.asarray(rng.normal(size=(vocab, vocab)), jnp.float32) for _ in "pq")
    sampling = Sampling.of(n, temperature=1.0, seed=np.arange(n) % 100)
    offset = 10 * jnp.asarray(np.arange(n) // 100, jnp.int32)  # rows differ by seed or position

    @jax.jit
    def round_(anchor, start):
        tokens, probs, last = [], [], anchor
        for k in range(drafts):
            last, q = draw(table_q[last], sampling, start + k, PURPOSE_DRAFT + k)
            tokens.append(last)
            probs.append(q)
        tokens = jnp.stack(tokens, 1)
        logits = table_p[jnp.concatenate([anchor[:, None], tokens], 1)]
        return verify(logits, tokens, jnp.stack(probs, 1), jnp.full(n, drafts), sampling, start)

    anchor, length, text = jnp.zeros(n, jnp.int32), np.zeros(n, int), np.zeros((n, 9), int)
    while length.min() < 3:
        out = round_(anchor, offset + jnp.asarray(length, jnp.int32))
        accepted, tokens = np.asarray(out.accepted), np.asarray(out.tokens)
        for slot in range(drafts + 1):
            rows_here = np.flatnonzero((slot <= accepted) & (length + slot < 9))
            text[rows_here, length[rows_here] + slot] = tokens[rows_here, slot]
        length = np.minimum(length + accepted + 1, 6)  # rows far ahead repeat; only 3 are read
        anchor = jnp.asarray(text[np.arange(n), length - 1], jnp.int32)
    p = np.exp(np.asarray(table_p, np.float64))
    p /= p.sum(-1, keepdims=True)
    law = (p[0][:, None, None] * p[:, :, None] * p[None]).ravel()
    counts = np.bincount(text[:, 0] * 9 + text[:, 1] * 3 + text[:, 2], minlength=27)
    assert chisquare(counts, law * n).pvalue > 1e-4


def mixed_batch():
    """Eight rows, greedy ones among them, with drafts that agree with the target now and then."""
    rng = np.random.default_rng(5)
    logits = np.round(rng.normal(size=(8, 4, 11)).astype(np.float32) * 2)  # ties
    sampling = Sampling.of(
        8, temperature=[0, 1, 0, 0.7, 2, 0, 1, 0], top_k=[0, 5, 3, 0, 0, 0, 1, 0], seed=np.arange(8)
    )
    q = rng.dirichlet(np.ones(11), (8, 3)).astype(np.float32)
    tokens = logits[:, :3].argmax(-1).astype(np.int32)
    tokens[::3, 1] = (tokens[::3, 1] + 1) % 11
    return logits, tokens, q, np.array([3, 3, 2, 3, 1, 0, 3, 3]), sampling


def test_filters_reach_every_slot():
    """F48: top-k, top-p and min-p hold for accepted drafts, residual and bonus alike."""
    logits = mixed_batch()[0]
    sampling = Sampling.of(8, 1.2, np.arange(8) % 4, 0.8, 0.05, np.arange(8))
    q = np.full((8, 3, 11), 1 / 11, np.float32)
    allowed = np.asarray(jax.jit(processed_probs)(logits, sampling)) > 0
    assert 0 < allowed.mean() < 0.7
    reached = np.zeros(4, int)
    for i in range(20):
        tokens = np.random.default_rng(i).integers(0, 11, (8, 3), dtype=np.int32)
        # Every other time drafts that the target may well accept, to reach the last slots.
        tokens = logits[:, :3].argmax(-1).astype(np.int32) if i % 2 else tokens
        out = judge(logits, tokens, q, np.full(8, 3), sampling, np.full(8, i))
        emitted = np.arange(4) <= out.accepted[:, None]
        assert np.take_along_axis(allowed, out.tokens[..., None], 2)[..., 0][emitted].all()
        reached += emitted.sum(0)
    assert reached.min() > 0


@pytest.mark.parametrize("certain", [False, True])
def test_greedy_rows_of_a_mixed_batch_are_pure_greedy(certain):
    """Whatever q says, and of ties the lowest id."""
    logits, tokens, q, width, sampling = mixed_batch()
    got = judge(logits, tokens, None if certain else q, width, sampling, np.arange(8))
    want = jax.tree.map(np.asarray, jax.jit(greedy)(logits, tokens, width))
    plain = ~np.asarray(sampling.sampled)
    assert plain.sum() == 4 and want.accepted[plain].max() == 3
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[plain], b[plain]), got, want)


def test_a_row_is_judged_the_same_alone_and_in_any_order():
    """F46, F47: permuted, and each row by itself."""
    logits, tokens, q, width, sampling = mixed_batch()
    batch = jax.tree.map(np.asarray, (logits, tokens, q, width, sampling, 3 * np.arange(8)))
    together = judge(*batch)
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    permuted = judge(*jax.tree.map(lambda x: x[order], batch))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[order]), permuted, together)
    for i in range(8):
        alone = judge(*jax.tree.map(lambda x, i=i: x[i : i + 1], batch))
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[0], b[i]), alone, together)


def test_copies_with_their_own_seeds_differ_and_equal_seeds_agree():
    """F44, F46: 16 copies of one request; the seed and only the seed tells them apart."""
    q = np.full((8, 3, 11), 1 / 11, np.float32)
    tokens = np.tile(np.arange(3, dtype=np.int32), (8, 1))
    args = (np.zeros((8, 4, 11), np.float32), tokens, q, np.full(8, 3))

    def run(seed):
        return judge(*args, Sampling.of(8, temperature=1.0, seed=seed), np.full(8, 7)).tokens

    own = run(np.arange(8))
    np.testing.assert_array_equal(own, run(np.arange(8)))
    own = np.concatenate([own, run(np.arange(8, 16))])
    assert len(np.unique(own, axis=0)) > 5  # of the 11 that can come
    assert len(np.unique(run(9), axis=0)) == 1


@pytest.mark.parametrize("drafts", [0, 3])
def test_without_admitted_drafts_it_is_plain_decoding(drafts):
    """F59: K = 0 and width 0 draw what `draw` draws at that position."""
    logits, tokens, q, _, sampling = mixed_batch()
    none, position = np.zeros(8, int), np.arange(8)
    logits, tokens, q = logits[:, : drafts + 1], tokens[:, :drafts], q[:, :drafts]
    got = judge(logits, tokens, q, none, sampling, position)
    want, _ = jax.jit(draw, static_argnums=3)(logits[:, 0], sampling, position, PURPOSE_NEXT)
    np.testing.assert_array_equal(got.tokens[:, 0], want)
    assert not got.accepted.any() and not got.admitted.any() and not got.tokens[:, 1:].any()


def test_a_greedy_batch_computes_no_softmax_and_no_random_number():
    """All that sampling costs stands behind one `lax.cond`."""
    logits, tokens, q, width, _ = mixed_batch()
    jaxpr = jax.make_jaxpr(verify)(
        *map(jnp.asarray, (logits, tokens, q, width)), Sampling.of(8), jnp.arange(8)
    ).jaxpr
    names = {e.primitive.name for e in jaxpr.eqns}
    assert names <= {"cond", "ge", "reduce_or", "convert_element_type"}
    branches = next(e for e in jaxpr.eqns if e.primitive.name == "cond").params["branches"]
    costly = r"\b(exp|log|cumsum|sort|while|scan|random_\w+)\b"
    assert not re.search(costly, str(branches[0]))
    assert {"exp", "random_bits"} <= set(re.findall(costly, str(branches[1])))
