"""The output layer in two stages: exact where it scores, nothing elsewhere; how tokens cluster."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from specjax.heads.gemma4_mtp.centroids import (
    CentroidWeights,
    cluster_of,
    cluster_tokens,
    clustered_logits,
)
from specjax.layers.sampling import Sampling
from tests.decode.adversary import VOCAB, tiny
from tests.heads.gemma4_mtp import cases


def test_drafts_come_from_the_chosen_clusters() -> None:
    target, weights = tiny("gemma4")
    head, params, borrowed = cases.on_target(target, weights, centroids=16, centroid_top_k=2)
    tokens = jnp.asarray(np.random.default_rng(7).integers(0, VOCAB, (2, 9)), jnp.int32)
    state, context = cases.from_scratch(target, weights, head, tokens, jnp.asarray([9, 4]))
    context = context.replace(sampling=Sampling.of(2, [0.0, 1.0], seed=[1, 2]))
    draft = cases.jit(partial(head.draft, num=3))
    proposal, _, logits = draft(params, borrowed, state, context)
    scored = np.isfinite(np.stack(logits, 1))
    assert (scored.sum(-1) == 2 * VOCAB // 16).all()
    assert np.take_along_axis(scored, np.asarray(proposal.tokens)[..., None], -1).all()
    assert (np.asarray(proposal.probs)[~scored] == 0).all()
    np.testing.assert_allclose(proposal.probs.sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(proposal.tokens[0], np.stack(logits, 1)[0].argmax(-1))


def test_clustered_logits_are_exact_where_they_are() -> None:
    rng = np.random.default_rng(8)
    table, centroids, y = (rng.normal(size=s).astype(np.float32) for s in ((24, 4), (6, 4), (5, 4)))
    order = rng.permutation(24).astype(np.int32)
    clusters = CentroidWeights(jnp.asarray(centroids), jnp.asarray(order))
    got = np.asarray(clustered_logits(clusters, jnp.asarray(table), jnp.asarray(y), 2))
    wanted = np.full((5, 24), -np.inf)
    for row in range(5):
        for c in np.argsort(-(centroids @ y[row]))[:2]:
            ids = order.reshape(6, 4)[c]
            wanted[row, ids] = table[ids] @ y[row]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    places = np.asarray(cluster_of(clusters))
    assert all(places[t] == i // 4 for i, t in enumerate(order))


def test_tokens_that_are_alike_share_a_cluster() -> None:
    rng = np.random.default_rng(9)
    middles = rng.normal(size=(6, 8)) * 5
    kind = np.repeat(np.arange(6), 5)
    rng.shuffle(kind)
    table = (middles[kind] + rng.normal(size=(30, 8)) * 0.1).astype(np.float32)
    centroids, order = cluster_tokens(table, 6)
    assert sorted(order.tolist()) == list(range(30))
    for members, centre in zip(order.reshape(6, 5), centroids, strict=True):
        assert len(set(kind[members])) == 1
        assert np.argmax(centroids @ centre) == np.argmax((centroids == centre).all(1))
