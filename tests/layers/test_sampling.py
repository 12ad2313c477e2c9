"""The law, the keys and the cost of sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from specjax.layers.sampling import (
    PURPOSE_DRAFT,
    PURPOSE_NEXT,
    Sampling,
    choose,
    draw,
    first_argmax,
    keys_at,
    processed_probs,
    uniforms,
)

V = 12
probs_of = jax.jit(processed_probs)
draw_from = jax.jit(draw)


def expected(logits, temperature, top_k, top_p, min_p):
    """One row in float64, by sorting, from the documented rules."""
    if temperature < 1e-5:
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    if top_k:
        p[p < np.sort(p)[::-1][min(top_k, len(p)) - 1]] = 0
    p /= p.sum()
    if top_p < 1:
        before = np.array([p[p > x].sum() for x in p])
        p = np.where((before < top_p) | (p == p.max()), p, 0)
    p[p < min_p * p.max() * (1 - 1e-9)] = 0
    return p / p.sum()


option = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.integers(0, V + 2),
    st.sampled_from([1.0, 0.0, 0.123, 0.501, 0.87]),
    st.sampled_from([0.0, 0.037, 0.313, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-9, 9), min_size=V, max_size=V),
    options=st.lists(option, min_size=4, max_size=4),
)
def test_processed_probs_follow_the_documented_rules(logits, options):
    """Integer logits make many ties, and the four rows mix options."""
    logits = np.array(logits, np.float32) * np.float32(0.37)
    got = probs_of(jnp.asarray(np.tile(logits, (4, 2, 1))), Sampling.of(4, *np.transpose(options)))
    want = np.stack([expected(logits, *one) for one in options])
    np.testing.assert_allclose(got[:, 0], want, atol=2e-6)
    np.testing.assert_array_equal(got[:, 0], got[:, 1])


def test_first_argmax_is_argmax():
    """Ties inside and across runs, -inf rows, infinities, a short last run; both dtypes."""
    x = np.random.default_rng(0).integers(-2, 3, size=(6, 5, 300)).astype(np.float32)
    x[1] = -np.inf
    x[2, :, [3, 200]] = np.inf
    x[4, :, 299] = x[5, :, 256] = x[3, :, 5] = x[3, :, 130] = 9
    for dtype in (jnp.float32, jnp.bfloat16):
        got, want = first_argmax(jnp.asarray(x, dtype)), jnp.argmax(jnp.asarray(x, dtype), -1)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, want)


@pytest.mark.torch
def test_filters_agree_with_transformers():
    """Values >= the k-th largest, and the nucleus, as the Hugging Face processors keep them."""
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(0).normal(size=(5, 300)).astype(np.float32) * 3
    logits[:, 7] = logits[:, 3]
    t, k = [0.7, 1.3, 1.0, 1.0, 0.8], [0, 20, 0, 0, 50]
    p, m = [1.0, 1.0, 0.9, 1.0, 0.8], [0.0, 0.0, 0.0, 0.1, 0.05]
    got = np.asarray(probs_of(jnp.asarray(logits), Sampling.of(5, t, k, p, m)))
    for i in range(5):
        scores = process.TemperatureLogitsWarper(t[i])(None, torch.tensor(logits[i : i + 1]))
        if k[i]:
            scores = process.TopKLogitsWarper(k[i])(None, scores)
        if p[i] < 1:
            scores = process.TopPLogitsWarper(p[i])(None, scores)
        if m[i]:
            scores = process.MinPLogitsWarper(m[i])(None, scores)
        np.testing.assert_allclose(got[i], torch.softmax(scores, -1)[0].numpy(), atol=1e-6)


def test_excluded_and_extreme_logits_give_no_nan():
    """-inf logits (tokens a head cannot draft), huge gaps and signed zeros."""
    logits = np.zeros((4, V), np.float32)
    logits[0, 1:] = -np.inf
    logits[1] = np.linspace(-1e5, 1e5, V)
    logits[2, ::2] = -0.0
    logits[3, 0] = 3e4
    sampling = Sampling.of(4, temperature=1e-4, top_k=3, top_p=0.9)
    tokens, probs = draw_from(jnp.asarray(logits), sampling, jnp.arange(4), 1)
    np.testing.assert_array_equal(probs[np.array([0, 1, 3])], np.eye(V)[[0, V - 1, 0]])
    np.testing.assert_allclose(probs[2], 1 / V, rtol=1e-6)
    assert tokens[0] == 0 and tokens[1] == V - 1 and tokens[3] == 0


@pytest.mark.parametrize("vocab", [1, 2, 97])
def test_choose_draws_by_the_probabilities(vocab):
    """Chi-square on 100k draws; a token of probability zero never comes."""
    p = np.random.default_rng(vocab).dirichlet(np.full(vocab, 0.7))
    if vocab > 2:
        p[[1, -1]] = 0
        p[40:55] = 0  # more than a whole run
    p /= p.sum()
    n = 100_000
    draws = jax.jit(
        lambda p: choose(
            jnp.tile(p, (n, 1)), keys_at(jnp.zeros(n, jnp.uint32), jnp.arange(n), PURPOSE_NEXT)
        )
    )
    counts = np.bincount(draws(jnp.asarray(p, jnp.float32)), minlength=vocab)
    assert not counts[p == 0].any()
    likely = p * n > 5
    seen, law = counts[likely], p[likely]
    assert vocab == 1 or chisquare(seen, law / law.sum() * seen.sum()).pvalue > 1e-4


def test_bfloat16_draws_follow_the_float32_law():
    """F42: fixed bfloat16 logits, 200k draws at T = 1, chi-square against the softmax."""
    logits = jnp.asarray([0.11, -1.3, 2.07, 0.5, -0.77, 1.9, -2.6, 1.01], jnp.bfloat16)
    n = 200_000
    sampling = Sampling.of(n, temperature=1.0, seed=np.arange(n))
    tokens, probs = draw_from(jnp.tile(logits, (n, 1)), sampling, jnp.zeros(n, int), PURPOSE_DRAFT)
    exact = np.exp(np.asarray(logits, np.float64))
    exact /= exact.sum()
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(probs[0], exact, atol=1e-7)
    assert chisquare(np.bincount(tokens, minlength=8), exact * n).pvalue > 1e-3


def test_every_seed_position_and_purpose_has_its_own_number():
    """F46: all differ, none is tied to another, and together they are uniform."""
    seed, position = (x.ravel() for x in np.meshgrid(np.arange(64), np.arange(512)))
    numbers_for = jax.jit(lambda s, p, purpose: uniforms(keys_at(s, p, purpose)))
    seeds = jnp.asarray(seed, jnp.uint32)
    numbers = np.stack([numbers_for(seeds, jnp.asarray(position), i) for i in range(3)])
    assert numbers.min() >= 0 and numbers.max() < 1
    # 98304 numbers of 23 bits: some 575 chance collisions, where a shared stream gives thousands.
    assert numbers.size - len(np.unique(numbers)) < 700
    assert np.abs(np.corrcoef(numbers)[np.triu_indices(3, 1)]).max() < 4 / np.sqrt(seed.size)
    cells = np.histogram2d(numbers[0], numbers[1], bins=8, range=[(0, 1), (0, 1)])[0]
    assert chisquare(cells.ravel()).pvalue > 1e-4


def test_a_row_draws_the_same_whatever_shares_its_batch():
    """F46, F47: alone, permuted or with other rows beside it."""
    logits = jax.random.normal(jax.random.key(0), (4, V))
    options = Sampling.of(
        4, temperature=[1.0, 0.5, 2.0, 0.0], top_k=[0, 3, 0, 0], seed=[1, 2, 3, 4]
    )
    batch = jax.tree.map(np.asarray, (logits, options, np.array([3, 1, 4, 1])))
    together, probs = draw_from(*batch, 2)
    order = np.array([2, 0, 3, 1])
    permuted, _ = draw_from(*jax.tree.map(lambda x: x[order], batch), 2)
    np.testing.assert_array_equal(permuted, together[order])
    for i in range(4):
        token, row = draw_from(*jax.tree.map(lambda x, i=i: x[i : i + 1], batch), 2)
        assert token[0] == together[i]
        if options.sampled[i]:
            np.testing.assert_allclose(row[0], probs[i], atol=1e-7)


def primitives(jaxpr):
    """Names of the operations that always run: the branches of a `cond` are left out."""
    names = []
    for eqn in jaxpr.eqns:
        names.append(eqn.primitive.name)
        if eqn.primitive.name == "cond":
            continue
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                names += primitives(getattr(inner, "jaxpr", inner))
    return names


def test_greedy_draws_compute_no_softmax_and_no_random_number():
    """Whatever is costly stands behind `lax.cond`; unused filters too."""
    logits, options = jnp.zeros((2, V)), Sampling.of(2)
    always = primitives(jax.make_jaxpr(draw)(logits, options, jnp.zeros(2, int), 2).jaxpr)
    assert set(always) <= {"cond", "ge", "reduce_or", "convert_element_type"}
    filters = primitives(jax.make_jaxpr(processed_probs)(logits, options).jaxpr)
    assert filters.count("cond") == 2 and "exp" in filters
    assert not {"sort", "while", "scan"} & set(filters)
    tokens, probs = draw_from(logits.at[1, 5].set(1.0), options, jnp.zeros(2, int), 2)
    assert tokens.tolist() == [0, 5] and not probs.any()
