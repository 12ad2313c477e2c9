"""Where blocks start and what their slots read and predict, against loops over positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.heads.dflash.anchors import Blocks, Texts, candidates, choose, lay_out
from specjax.heads.dflash.head import DFlashHead
from tests.heads.dflash.cases import DFLASH, HIDDEN, MASK, tiny

B, S, SIZE = 3, 24, 4
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 30, (B, S))
ON = RNG.uniform(size=(B, S)) < 0.7
DOCUMENTS = np.stack([[0] * 9 + [1] * 10 + [-1] * 5, [0] * 3 + [1] * 21, [0] * 24])


def head_of(**settings: Any) -> DFlashHead:
    return tiny({**DFLASH, "block_size": SIZE}, **settings)[0]


def texts(documents: np.ndarray | None = None) -> Texts:
    """Three rows; packed ones count their positions anew in each document."""
    on, positions = ON, np.broadcast_to(np.arange(S), (B, S))
    if documents is not None:
        on = ON & (documents >= 0)
        starts = np.stack([[list(row).index(d) for d in row] for row in documents])
        positions = np.arange(S) - starts
    return Texts(
        tokens=jnp.asarray(TOKENS),
        loss_mask=jnp.asarray(on),
        hidden=jnp.zeros((B, S, HIDDEN)),
        taps=jnp.zeros((3, B, S, HIDDEN)),
        positions=jnp.asarray(positions),
        documents=None if documents is None else jnp.asarray(documents),
    )


@pytest.mark.parametrize("packed", [False, True])
def test_candidates(packed: bool) -> None:
    given = texts(DOCUMENTS if packed else None)
    on = np.asarray(given.loss_mask)
    pair = np.asarray(candidates(head_of(anchor_rule="pair"), given))
    room = np.asarray(candidates(head_of(anchor_rule="room"), given))
    for b, t in np.ndindex(B, S):
        beside = t + 1 < S and on[b, t + 1]
        if packed and t + 1 < S:
            beside = beside and DOCUMENTS[b, t] == DOCUMENTS[b, t + 1]
        assert pair[b, t] == (on[b, t] and beside)
        assert room[b, t] == (on[b, t] and t < S - SIZE)
    assert pair.any() and room.any() and (pair != room).any()


def test_choose_draws_without_replacement() -> None:
    allowed = ON.copy()
    allowed[1] = False
    allowed[1, [4, 20]] = True
    allowed[2] = False
    draws = jax.jit(jax.vmap(lambda key: choose(key, jnp.asarray(allowed), 5)))(
        jax.random.split(jax.random.key(0), 400)
    )
    anchors, keep = (np.asarray(x) for x in draws)
    assert anchors.shape == keep.shape == (400, B, 5)
    for at, kept in zip(anchors.reshape(-1, B, 5), keep.reshape(-1, B, 5), strict=True):
        assert kept.sum(1).tolist() == [5, 2, 0]
        assert at[1].tolist() == [4, 20, 0, 0, 0] and not at[2].any()
        assert (np.diff(at[0]) > 0).all() and allowed[0, at[0]].all()
    counts = np.bincount(anchors[:, 0].ravel(), minlength=S)[allowed[0]]
    expected = 400 * 5 / allowed[0].sum()
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_choose_is_the_keys_alone_and_never_more_than_there_is() -> None:
    one, two = (choose(jax.random.key(k), jnp.asarray(ON), 4)[0] for k in (1, 2))
    np.testing.assert_array_equal(one, choose(jax.random.key(1), jnp.asarray(ON), 4)[0])
    assert (np.asarray(one) != np.asarray(two)).any()
    anchors, keep = choose(jax.random.key(1), jnp.asarray(ON), 512)
    assert anchors.shape == (B, S)
    np.testing.assert_array_equal(keep.sum(1), ON.sum(1))


ANCHORS = np.asarray([[0, 5, 7, 21], [2, 13, 0, 0], [1, 20, 22, 0]])
KEEP = np.asarray([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]) > 0


def expected(rule: str, from_anchor: bool, documents: np.ndarray | None) -> dict[str, np.ndarray]:
    """Each slot on its own."""
    given = texts(documents)
    on, positions = np.asarray(given.loss_mask), np.asarray(given.positions)
    out = {
        f.name: np.zeros((*ANCHORS.shape, SIZE), int)
        for f in dataclasses.fields(Blocks)
        if f.name not in ("anchors", "keep")
    }
    for b, n in np.ndindex(*ANCHORS.shape):
        a, prefix = ANCHORS[b, n], True
        for k in range(SIZE):
            at = (b, n, k)
            out["tokens"][at] = TOKENS[b, a] if k == 0 and KEEP[b, n] else MASK
            out["positions"][at] = positions[b, a if KEEP[b, n] else 0] + k
            label = a + k + 1 if from_anchor else a + k
            before = max(label - 1, a)
            read = [min(i, S - 1) if KEEP[b, n] else 0 for i in (before, label)]
            out["previous"][at], out["labels"][at] = TOKENS[b, read[0]], TOKENS[b, read[1]]
            out["teacher"][at] = (read[1] - 1) % S if KEEP[b, n] else 0
            place = a + k if rule == "slot" else label
            fine = KEEP[b, n] and label < S and on[b, min(place, S - 1)]
            if documents is not None and fine:
                fine = documents[b, label] == documents[b, a]
            if k == 0 and not from_anchor:
                continue  # the anchor's own slot predicts nothing and breaks nothing
            prefix = prefix and fine
            out["supervised"][at] = prefix if rule == "prefix" else fine
    return out


@pytest.mark.parametrize("rule", ["prefix", "label", "slot"])
@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_lay_out(rule: str, from_anchor: bool, packed: bool) -> None:
    documents = DOCUMENTS if packed else None
    head = head_of(sample_from_anchor=from_anchor, supervise=rule)
    blocks = lay_out(head, texts(documents), jnp.asarray(ANCHORS), jnp.asarray(KEEP))
    for name, want in expected(rule, from_anchor, documents).items():
        np.testing.assert_array_equal(getattr(blocks, name), want, err_msg=name)


def test_slots_behind_a_documents_end_may_count_where_asked() -> None:
    head = head_of(supervise="slot")
    given = texts(DOCUMENTS)
    at = (jnp.asarray(ANCHORS), jnp.asarray(KEEP))
    inside, across = (
        np.asarray(lay_out(head, given, *at, across_documents=x).supervised) for x in (False, True)
    )
    assert across[0, 2].sum() > inside[0, 2].sum() and (across >= inside).all()


def test_f19_packed_documents_end() -> None:
    """F19: documents of 6 tokens; a block of 4 at position 4 has one label, and sees one text."""
    head = head_of(sample_from_anchor=True, supervise="label")
    documents = np.repeat([[0, 1]], 6, axis=1)
    given = Texts(
        tokens=jnp.arange(1, 13)[None],
        loss_mask=jnp.ones((1, 12), bool),
        hidden=jnp.zeros((1, 12, HIDDEN)),
        taps=jnp.zeros((3, 1, 12, HIDDEN)),
        positions=jnp.asarray([[*range(6), *range(6)]]),
        documents=jnp.asarray(documents),
    )
    assert candidates(head, given)[0].tolist() == [*[True] * 5, False, *[True] * 5, False]
    blocks = lay_out(head, given, jnp.asarray([[4, 8]]), jnp.ones((1, 2), bool))
    assert blocks.supervised[0].tolist() == [[True, False, False, False], [True] * 3 + [False]]
    assert blocks.labels[0][blocks.supervised[0]].tolist() == [6, 10, 11, 12]
    assert blocks.positions[0].tolist() == [[4, 5, 6, 7], [2, 3, 4, 5]]
