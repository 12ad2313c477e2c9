"""The law of the output, exactly: the sum over all drafts, acceptances and next tokens.

Drafts and targets are Markov chains, so that each draft changes the distributions behind it.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.layers.sampling import Sampling, processed_probs
from specjax.verify.rejection import (
    accept_mask,
    accept_probability,
    next_distribution,
)

V = 4


@functools.partial(jax.jit, static_argnames="certain")
def judged(target, draft, options, tokens, width, certain):
    """Target probabilities, acceptance of each draft, next law at each accepted length."""
    batch, drafts = tokens.shape
    p, q = processed_probs(target, options), processed_probs(draft, options)
    seen = None if certain else q

    def law(accepted):
        return next_distribution(p, seen, tokens, jnp.full(batch, accepted), width)

    laws = jax.vmap(law, out_axes=1)(jnp.arange(drafts + 1))
    return p, q, accept_probability(p, seen, tokens), laws


def output_law(target, draft, options, width, certain=False):
    """Joint law of the next K + 1 tokens; `target`, `draft` are [K(+1), V previous, V] logits.

    A round that ends early is continued by the target's own chain. Returns (got, wanted).
    """
    drafts = draft.shape[0]
    chains = np.array([*itertools.product(range(V), repeat=drafts)], int).reshape(V**drafts, drafts)
    previous = np.pad(chains, ((0, 0), (1, 0)))
    at = np.arange(drafts + 1)
    rows_p, rows_q = target[at, previous], draft[at[:-1], previous[:, :-1]]
    full = Sampling.of(len(chains), **options), jnp.asarray(chains), jnp.full(len(chains), width)
    out = judged(jnp.asarray(rows_p), jnp.asarray(rows_q), *full, certain)
    p, q, accept, laws = (np.asarray(x, np.float64) for x in out)
    accept = accept * (at[:-1] < width)
    if certain:  # a greedy drafter: its one chain has probability one
        q = np.eye(V)[rows_q.argmax(-1)]
    drawn = np.take_along_axis(q, chains[..., None], 2)[..., 0].prod(1)
    table = np.zeros((drafts + 1, V, V))
    table[at, previous] = p
    wanted = table[0, 0]
    for k in at[1:]:
        wanted = wanted[..., None] * table[k]
    got = np.zeros_like(wanted)
    for i in np.flatnonzero(drawn):
        for a in at:
            stops_here = accept[i, :a].prod() * (1 - accept[i, a] if a < drafts else 1.0)
            tail = laws[i, a]
            for k in at[a + 1 :]:
                tail = tail[..., None] * table[k]
            got[tuple(chains[i, :a])] += drawn[i] * stops_here * tail
    return got, wanted


def logits(rows):
    """Logits of `rows` distributions with zeros, ties and (nearly) one-hot ones among them."""
    entry = st.one_of(st.integers(-4, 4).map(lambda x: x / 2), st.sampled_from([-np.inf, 40.0]))
    row = st.lists(entry, min_size=V, max_size=V).filter(lambda r: max(r) > -np.inf)
    return st.lists(row, min_size=rows, max_size=rows).map(lambda r: np.array(r, np.float32))


option = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 0, 1, 2, 3]),
        "top_p": st.sampled_from([1.0, 1.0, 0.4, 0.8]),
        "min_p": st.sampled_from([0.0, 0.0, 0.2]),
    }
)


@pytest.mark.parametrize(
    ("drafts", "certain"),
    [(0, False), (1, False), (2, False), (3, False), (4, False), (1, True), (3, True)],
)
def test_output_law_is_the_targets(drafts, certain):
    """sum over drafts of q * accept + residual == p, to 1e-6, for all chains.

    F43: `certain` is a greedy drafter under a sampling target, a point mass.
    """

    @settings(max_examples=12, deadline=None)
    @given(
        target=logits((drafts + 1) * V),
        draft=logits(max(drafts, 1) * V),
        options=option,
        width=st.integers(0, drafts + 1),
    )
    def check(target, draft, options, width):
        got, wanted = output_law(
            target.reshape(-1, V, V), draft.reshape(-1, V, V)[:drafts], options, width, certain
        )
        np.testing.assert_allclose(got, wanted, atol=1e-6)

    check()


def test_the_law_would_show_a_softmaxed_residual():
    """F45 by hand: p = (.6, .4), q = (.9, .1); the residual is (0, 1), not softmax of it."""
    p = jnp.asarray([[[0.6, 0.4], [0.5, 0.5]]])
    q = jnp.asarray([[[0.9, 0.1]]])
    drafts, width = jnp.asarray([[0]]), jnp.ones(1, int)
    np.testing.assert_allclose(accept_probability(p, q, drafts), [[2 / 3]], rtol=1e-6)
    np.testing.assert_array_equal(
        next_distribution(p, q, drafts, jnp.zeros(1, int), width), [[0.0, 1.0]]
    )


def test_no_residual_behind_a_cut_by_width():
    """A draft that was not judged was not rejected: the next token comes from p itself."""
    p = jnp.asarray([[[0.6, 0.4], [0.7, 0.3], [0.5, 0.5]]])
    q = jnp.asarray([[[0.9, 0.1], [0.2, 0.8]]])
    drafts = jnp.asarray([[0, 1]])
    for width in range(3):
        law = next_distribution(p, q, drafts, jnp.full(1, width), jnp.full(1, width))
        np.testing.assert_array_equal(law[0], p[0, width])
        mask = accept_mask(jnp.ones((1, 2)), jnp.full((1, 2), 0.5), jnp.full(1, width))
        assert mask[0].tolist() == [width > 0, width > 1]


def test_acceptance_is_strict_and_equal_distributions_leave_no_nan():
    """u = 0 does not accept an impossible draft; p = q accepts all and falls back to p."""
    width = jnp.full(1, 2)
    edge = accept_mask(jnp.asarray([[0.0, 1.0]]), jnp.asarray([[0.0, 1 - 2**-24]]), width)
    assert edge[0].tolist() == [False, True]
    p = jnp.asarray([[[0.0, 1.0], [0.3, 0.7], [1.0, 0.0]]])
    drafts = jnp.asarray([[1, 0]])
    np.testing.assert_array_equal(accept_probability(p, p[:, :2], drafts), [[1.0, 1.0]])
    for a in range(3):
        law = next_distribution(p, p[:, :2], drafts, jnp.full(1, a), width)
        np.testing.assert_array_equal(law[0], p[0, a])
        law = next_distribution(p, None, jnp.asarray([[1, 0]]), jnp.full(1, a), width)
        assert np.isfinite(law).all() and abs(float(law.sum()) - 1) < 1e-6
