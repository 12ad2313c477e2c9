"""DSpark's sequential and confidence heads, against their formulas and against drafting."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.heads.dflash.confidence import confidence_logits
from specjax.heads.dflash.sequential import correct
from specjax.layers.sampling import Sampling, processed_probs
from tests.heads.dflash import cases
from tests.heads.dflash.cases import DSPARK, jit

FORMS = ("vanilla", "gated", "rnn")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def reference_correction(params: Any, form: str, h: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return what is added to the logits of one block, in float64."""
    w: Any = jax.tree.map(lambda x: np.asarray(x, np.float64), params.markov)
    rank = w.w1.shape[1]
    state, out = np.zeros(rank), []
    for k in range(len(h)):
        e = w.w1[before[k]]
        if form == "vanilla":
            given = e
        elif form == "gated":
            given = sigmoid(w.gate @ np.concatenate([h[k], e]) + w.gate_bias) * e
        else:
            f, c, o = np.split(w.joint @ np.concatenate([state, e, h[k]]) + w.joint_bias, 3)
            given = np.tanh(o)
            state = sigmoid(f) * state + (1 - sigmoid(f)) * np.tanh(c)
        out.append(w.w2 @ given)
    return np.stack(out)


@pytest.mark.parametrize("form", FORMS)
def test_corrections_are_what_the_published_formulas_say(form: str) -> None:
    head, params = cases.tiny(DSPARK, markov_head=form)
    rng = np.random.default_rng(0)
    h = rng.normal(size=(2, 3, 5, cases.HIDDEN)).astype(np.float32)
    base = rng.normal(size=(2, 3, 5, cases.VOCAB)).astype(np.float32)
    before = rng.integers(0, cases.VOCAB, (2, 3, 5))
    got = jit(lambda *x: correct(head, *x))(params, base, h, before)
    for at in np.ndindex(2, 3):
        expected = base[at] + reference_correction(params, form, h[at], before[at])
        np.testing.assert_allclose(got[at], expected, atol=2e-5)
    plain = dataclasses.replace(params, markov=None)
    np.testing.assert_array_equal(correct(head, plain, base, h, before), base)


@pytest.mark.parametrize(
    ("form", "from_anchor", "kept"),
    [
        ("vanilla", True, None),
        ("gated", True, None),
        ("rnn", False, np.arange(1, 40, 2)),
        ("rnn", True, None),
    ],
)
def test_drafts_are_drawn_from_what_teacher_forcing_gives(
    form: str, from_anchor: bool, kept: np.ndarray | None
) -> None:
    head, params = cases.tiny(DSPARK, kept, markov_head=form, sample_from_anchor=from_anchor)
    lent, state = cases.borrowed(), cases.after(head, params, cases.states(3, 9))
    sampling = Sampling.of(3, temperature=[0.0, 1.0, 0.8], top_k=[0, 0, 8], seed=[1, 2, 3])
    anchor = jnp.asarray([3, 4, 5])
    num = 4
    around = cases.context(state, anchor, sampling)
    proposal, done = cases.draft(head, params, lent, state, around, num)
    # A slot that drafts nothing goes through the sequential head as well, with the anchor.
    ahead = [anchor] * (2 - from_anchor)
    before = jnp.stack([*ahead, *proposal.tokens.T[:-1]], axis=1)
    np.testing.assert_array_equal(done.previous, before[:, not from_anchor :])
    output = np.asarray(lent.output, np.float64)
    output = output if kept is None else output[kept]
    base = np.asarray(done.hidden, np.float64) @ output.T
    for b in range(3):
        hidden = np.asarray(done.hidden[b])[: before.shape[1]]
        more = reference_correction(params, form, hidden, before[b])
        expected = (base[b][: len(more)] + more)[not from_anchor :][:num]
        np.testing.assert_allclose(done.logits[b], expected, atol=2e-4)
    q = jit(processed_probs)(done.logits, sampling)
    ids = np.arange(cases.VOCAB) if kept is None else kept
    spread = np.zeros((3, num, cases.VOCAB))
    spread[..., ids] = q
    np.testing.assert_allclose(proposal.probs, spread, atol=1e-5)
    assert np.isin(proposal.tokens, ids).all()
    assert (np.take_along_axis(spread, np.asarray(proposal.tokens)[..., None], -1) > 0).all()
    best = ids[np.argmax(done.logits[0], -1)]
    np.testing.assert_array_equal(proposal.tokens[0], best)


def test_two_drafts_of_a_block_depend_on_each_other_through_the_correction() -> None:
    head, params = cases.tiny(DSPARK)
    state = cases.after(head, params, cases.states(8, 9, seed=1).at[:].set(0.5))
    sampling = Sampling.of(8, temperature=1.0, seed=list(range(8)))
    around = cases.context(state, 3, sampling)
    proposal, done = cases.draft(head, params, cases.borrowed(), state, around, 2)
    np.testing.assert_allclose(done.logits[:, 0], done.logits[:1, 0].repeat(8, 0), atol=1e-5)
    first = np.asarray(proposal.tokens[:, 0])
    assert len(set(first)) > 1
    for a in range(8):
        same = np.abs(done.logits[a, 1] - done.logits[0, 1]).max() < 1e-5
        assert same == (first[a] == first[0])


@pytest.mark.parametrize("with_markov", [True, False])
def test_a_confidence_sees_the_token_before_and_nothing_later(with_markov: bool) -> None:
    head, params = cases.tiny(DSPARK, confidence_with_markov=with_markov)
    rng = np.random.default_rng(0)
    h = rng.normal(size=(2, 5, cases.HIDDEN)).astype(np.float32)
    before = rng.integers(0, cases.VOCAB, (2, 5))
    got = np.asarray(confidence_logits(head, params, jnp.asarray(h), jnp.asarray(before)))
    features = h.astype(np.float64)
    if with_markov:
        embedded = np.asarray(params.markov.w1, np.float64)[before]
        features = np.concatenate([features, embedded], -1)
    weight = np.asarray(params.confidence.weight, np.float64)[0]
    np.testing.assert_allclose(got, features @ weight + float(params.confidence.bias[0]), atol=1e-5)
    other = before.copy()
    other[:, 3] = (other[:, 3] + 1) % cases.VOCAB
    moved = np.asarray(confidence_logits(head, params, jnp.asarray(h), jnp.asarray(other)))
    assert ((moved != got).any(0) == (np.arange(5) == 3) & with_markov).all()


def test_a_draft_has_no_say_in_its_own_confidence() -> None:
    head, params = cases.tiny(DSPARK, markov_head="rnn")
    state = cases.after(head, params, cases.states(16, 9, seed=1).at[:].set(0.5))
    sampling = Sampling.of(16, temperature=1.5, seed=list(range(16)))
    around = cases.context(state, 3, sampling)
    proposal = cases.draft(head, params, cases.borrowed(), state, around, 4)[0]
    tokens, confidence = np.asarray(proposal.tokens), np.asarray(proposal.confidence)
    for row in range(1, 16):
        alike = int(np.argmin(np.append(tokens[row] == tokens[0], False)))
        np.testing.assert_allclose(
            confidence[row, : alike + 1], confidence[0, : alike + 1], atol=1e-5
        )
        if alike < 3:
            assert abs(confidence[row, alike + 1] - confidence[0, alike + 1]) > 1e-6
