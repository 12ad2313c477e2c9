"""Training of block heads: published tensors, what blocks see, and where gradients go."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.fixture_checks import blocks as inference
from scripts.fixture_checks import blocks_training
from scripts.fixture_checks.compare import compare
from scripts.fixture_checks.fixture import read_fixture
from scripts.fixture_checks.outcome import Outcome
from specjax.core.errors import ConfigError
from specjax.heads import pieces
from specjax.heads.base import TrainBatch
from specjax.heads.dflash import block_pass, loss
from specjax.heads.dflash.anchors import Texts, lay_out, texts_of
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.dflash.network import DFlashWeights
from specjax.heads.objective import Objective
from tests.heads.dflash import cases
from tests.heads.dflash.cases import DFLASH, DSPARK, HIDDEN, SLIDING, VOCAB, jit

QUICK: dict[str, Any] = {"remat": False, "num_anchors": 4}
ONE: dict[str, Any] = {**DSPARK, "layers": 1}
DEEPSPEC = Objective(
    terms=("hard_ce", "l1"),
    factors=(0.1, 0.9),
    weighting="dflash_from_anchor",
    normaliser="weights_eps",
)


def batch_of(rows: int = 2, length: int = 20, seed: int = 0) -> TrainBatch:
    """Texts whose first quarter is a prompt; the last row is shorter by three."""
    rng = np.random.default_rng(seed)
    lengths = np.full(rows, length)
    lengths[-1] -= 3
    at = np.arange(length)
    on = (at >= length // 4) & (at < lengths[:, None])
    return TrainBatch(
        tokens=jnp.asarray(rng.integers(0, VOCAB - 1, (rows, length)) * (at < lengths[:, None])),
        loss_mask=jnp.asarray(on),
        lengths=jnp.asarray(lengths),
        hidden=jnp.asarray(rng.normal(size=(rows, length, HIDDEN)), jnp.float32),
        taps=cases.states(rows, length, seed=seed),
        key=jax.random.key(seed),
    )


def at(*rows: list[int]) -> tuple[jax.Array, jax.Array]:
    anchors = jnp.asarray(rows)
    return anchors, jnp.ones(anchors.shape, bool)


@pytest.mark.parametrize(
    "name", ["dspark_speculators", pytest.param("dspark_gemma4", marks=pytest.mark.slow)]
)
def test_every_training_tensor_of_the_references(name: str) -> None:
    fixture = read_fixture(cases.FIXTURES / name)
    pair = inference.load(fixture)
    tensors = blocks_training.training(pair.head, pair.params, pair.borrowed, fixture)
    lines = [x for x in compare(fixture, Outcome(tensors)) if x.tensor.startswith("train.")]
    assert len(lines) > 40 and not [x for x in lines if x.failed or x.absent]
    assert sum(".grad." in x.tensor for x in lines) > 15


@pytest.mark.parametrize(
    "settings",
    [{}, SLIDING, {**SLIDING, "layout": "speculators", "causal": "none"}],
    ids=["full", "sliding", "speculators"],
)
def test_a_block_in_training_is_the_block_it_would_draft(settings: dict[str, Any]) -> None:
    """One pass over all blocks of a text, against each drafted from a cache of its context."""
    head, params = cases.tiny({**DFLASH, **settings}, **QUICK)
    texts = texts_of(batch_of())
    anchors = [[5, 14], [6, 9]]
    blocks = lay_out(head, texts, *at(*anchors))
    hidden = jit(block_pass.run_blocks, static_argnums=0)(
        head, params, cases.borrowed(), texts, blocks
    )
    draft = jit(head.draft, static_argnums=4)
    for n in range(2):
        position = jnp.asarray([row[n] for row in anchors])
        state = cases.after(head, params, texts.taps, position)
        anchor = jnp.take_along_axis(texts.tokens, position[:, None], axis=1)[:, 0]
        _, done = draft(params, cases.borrowed(), state, cases.context(state, anchor), 1)
        np.testing.assert_allclose(hidden[:, n], done.hidden, rtol=2e-5, atol=2e-5)


def test_f18_blocks_closer_than_their_length_leak_nothing() -> None:
    """F18: anchors 2 and 4, blocks of 4: nothing at or behind an anchor reaches its slots."""
    head, params = cases.tiny(ONE, block_size=4, **QUICK)
    texts = texts_of(batch_of(1, 16))
    blocks = lay_out(head, texts, *at([2, 4]))

    def hidden(taps: jax.Array) -> jax.Array:
        given = texts.replace(taps=taps)
        return block_pass.run_blocks(head, params, cases.borrowed(), given, blocks)[0]

    rng = np.random.default_rng(0)
    pull = jnp.asarray(rng.normal(size=(2, 4, HIDDEN)), jnp.float32)

    @jit
    def pulls(taps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """States, and the gradient of a random sum over each block's."""
        out, back = jax.vjp(hidden, taps)
        each = [back(pull * (jnp.arange(2) == n)[:, None, None])[0] for n in range(2)]
        return out, jnp.stack(each)

    out, gradients = pulls(texts.taps)
    moved, _ = pulls(texts.taps.at[:, :, 5].add(3.0))
    np.testing.assert_array_equal(out, moved)
    reach = np.abs(np.asarray(gradients)).max((1, 2, 4))  # [block, position]
    for n, anchor in enumerate((2, 4)):
        assert (reach[n, :anchor] > 0).all() and not reach[n, anchor:].any()


def test_f18_a_slot_is_not_told_its_token() -> None:
    """The text's tokens behind an anchor change no state, and no logit before their own slot."""
    head, params = cases.tiny(ONE, markov_head="rnn", **QUICK)
    texts = texts_of(batch_of(1, 16))

    @jit
    def logits(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        given = texts.replace(tokens=tokens)
        blocks = lay_out(head, given, *at([5]))
        hidden = block_pass.run_blocks(head, params, cases.borrowed(), given, blocks)
        return hidden, loss.slot_logits(head, params, cases.borrowed(), hidden, blocks.previous)[1]

    before, after = logits(texts.tokens), logits(texts.tokens.at[0, 8:].add(1))
    np.testing.assert_array_equal(before[0], after[0])
    # Slot k predicts token 6 + k: slots up to 2 know nothing of token 8, slot 3 is fed it.
    np.testing.assert_array_equal(before[1][0, 0, :3], after[1][0, 0, :3])
    assert (np.asarray(before[1][0, 0, 3]) != np.asarray(after[1][0, 0, 3])).any()


def joined(parts: list[Texts]) -> Texts:
    """Pack texts of one row each into one row."""
    named = {
        f.name: [getattr(part, f.name) for part in parts]
        for f in dataclasses.fields(Texts)
        if f.name not in ("taps", "documents")
    }
    row = {name: jnp.concatenate(x, axis=1) for name, x in named.items()}
    home = [jnp.full(part.tokens.shape, i) for i, part in enumerate(parts)]
    taps = jnp.concatenate([part.taps for part in parts], axis=2)
    return Texts(**row, taps=taps, documents=jnp.concatenate(home, axis=1))


@pytest.mark.parametrize("settings", [{}, SLIDING], ids=["full", "sliding"])
def test_f19_packed_documents_are_as_if_alone(settings: dict[str, Any]) -> None:
    """F19: the loss of a packed row is the sum of the documents' own."""
    rule = dataclasses.replace(DEEPSPEC, normaliser="rows")
    # All tokens count: without the documents' ends every block would run on into the next.
    head, params = cases.tiny(
        {**DFLASH, **settings}, block_size=4, supervise="label", objective=rule, **QUICK
    )
    alone = [
        texts_of(batch_of(1, 13, seed)).replace(loss_mask=jnp.ones((1, 10), bool))
        for seed in (1, 2)
    ]
    alone = [
        dataclasses.replace(
            x,
            tokens=x.tokens[:, :10],
            hidden=x.hidden[:, :10],
            taps=x.taps[:, :, :10],
            positions=x.positions[:, :10],
        )
        for x in alone
    ]
    places = ([2, 8], [4, 9])

    @jit
    def total(texts: Texts, anchors: jax.Array) -> jax.Array:
        blocks = lay_out(head, texts, anchors, jnp.ones(anchors.shape, bool))
        return loss.block_loss(head, params, cases.borrowed(), texts, blocks)[0].total

    one, two = (total(x, jnp.asarray([p])) for x, p in zip(alone, places, strict=True))
    packed = total(joined(alone), jnp.asarray([[2, 8, 14, 19]]))
    np.testing.assert_allclose(packed, one + two, rtol=1e-5)
    bare = total(joined(alone).replace(documents=None), jnp.asarray([[2, 8, 14, 19]]))
    assert abs(float(bare - packed)) > 0.1


@partial(jit, static_argnums=0)
def gradients_of(head: DFlashHead, params: DFlashWeights, batch: TrainBatch) -> Any:
    """Return ((loss, metrics), gradients)."""
    differentiate = jax.value_and_grad(head.loss, has_aux=True, allow_int=True)
    return differentiate(params, cases.borrowed(), batch)


def touched(tree: Any) -> bool:
    return any(np.asarray(x).any() for x in jax.tree.leaves(tree) if x.dtype == jnp.float32)


@pytest.mark.parametrize("detach", [True, False])
def test_f20_the_confidence_loss_stays_in_its_head(detach: bool) -> None:
    """F20: with the confidence term alone, nothing else moves; switched off, as published."""
    rule = dataclasses.replace(DEEPSPEC, factors=(0.0, 0.0))
    head, params = cases.tiny(ONE, objective=rule, detach_confidence=detach, **QUICK)
    (_, metrics), found = gradients_of(head, params, batch_of())
    assert metrics["loss_confidence"] > 0 and touched(found.confidence)
    for part in (found.fc, found.layers, found.norm, found.hidden_norm, found.markov.w1):
        assert touched(part) != detach
    # The target of the confidence, the overlap, is never a way back.
    assert not touched(found.markov.w2) and not touched(found.output)


def test_f21_confidence_without_a_sequential_head() -> None:
    """F21: rank 0 trains as DFlash with a confidence head; Markov features of nothing do not."""
    settings = {**ONE, "markov_rank": 0}
    with pytest.raises(ConfigError, match="needs a sequential head"):
        DFlashConfig(**settings)
    head, params = cases.tiny(settings, confidence_with_markov=False, **QUICK)
    (value, metrics), found = gradients_of(head, params, batch_of())
    assert np.isfinite(value) and metrics["loss_confidence"] > 0
    assert touched(found.confidence) and touched(found.layers) and found.markov is None


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and logits a few blocks at a time, activations computed anew: the same gradients."""
    head, params = cases.tiny(ONE, objective=DEEPSPEC, num_anchors=5)
    plain = dataclasses.replace(head, config=dataclasses.replace(head.config, remat=False))
    want = gradients_of(plain, params, batch_of())
    monkeypatch.setattr(pieces, "ELEMENTS", 2 * 2 * 7 * VOCAB)  # 2 of a row's 5 blocks
    monkeypatch.setattr(block_pass, "_SCORES", 900)  # 2 of a row's 5
    got = gradients_of(head, params, batch_of())
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_a_draft_vocabulary_counts_what_can_be_drafted() -> None:
    kept = np.sort(np.random.default_rng(3).choice(VOCAB, 25, replace=False))
    settings = {**ONE, "layout": "speculators"}
    head, params = cases.tiny(settings, kept, objective=DEEPSPEC, **QUICK)
    texts = texts_of(batch_of())
    blocks = lay_out(head, texts, *at([5, 9], [6, 10]))

    @jit
    def compared(params: DFlashWeights) -> tuple[loss.Compared, jax.Array]:
        found = loss.block_loss(head, params, cases.borrowed(), texts, blocks)[1]
        hidden = block_pass.run_blocks(head, params, cases.borrowed(), texts, blocks)
        logits = loss.slot_logits(head, params, cases.borrowed(), hidden, blocks.previous)
        return found, logits[1]

    slots, logits = compared(params)
    labels, known = np.asarray(blocks.labels), np.isin(blocks.labels, kept)
    np.testing.assert_array_equal(slots.counted, np.asarray(blocks.supervised) & known)
    assert not known.all() and slots.counted.sum() > 5
    teacher = np.asarray(texts.hidden @ cases.borrowed().output[kept].T, np.float64)
    for at_ in zip(*np.nonzero(np.asarray(slots.counted)), strict=True):
        z = np.asarray(logits[at_], np.float64)
        q = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        own = list(kept).index(labels[at_])
        np.testing.assert_allclose(slots.terms["hard_ce"][at_], -np.log(q[own]), rtol=1e-4)
        y = teacher[at_[0], int(blocks.teacher[at_])]
        p = np.exp(y - y.max()) / np.exp(y - y.max()).sum()
        np.testing.assert_allclose(slots.accept[at_], np.minimum(p, q).sum(), rtol=1e-4)


def test_texts_without_answers_and_empty_rows_give_nothing() -> None:
    head, params = cases.tiny(ONE, objective=DEEPSPEC, **QUICK)
    batch = batch_of()
    silent = batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))
    (value, metrics), found = gradients_of(head, params, silent)
    assert float(value) == 0 and not touched(found)
    assert all(np.isfinite(x).all() for x in metrics.values()) and metrics["blocks"] == 0
    # A row that only fills up is one without answers, whatever it holds.
    filled = batch.replace(lengths=batch.lengths.at[1].set(0))
    quiet = batch.replace(loss_mask=batch.loss_mask.at[1].set(False))
    one, two = (gradients_of(head, params, x) for x in (filled, quiet))
    assert one[0][1]["blocks"] == 4 and touched(one[1])
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(x, y)


def test_metrics_of_blocks_written_by_hand() -> None:
    counted = jnp.asarray([[[1, 1, 1], [1, 1, 0], [0, 0, 0]]]) > 0
    share = jnp.asarray([[[0.5, 0.5, 1.0], [1.0, 0.25, 1.0], [1.0, 1.0, 1.0]]])
    z = jnp.log(jnp.asarray([[[3.0, 1.0, 1.0], [1.0, 3.0, 1.0], [1.0, 1.0, 1.0]]]))
    slots = loss.Compared({}, share, *(jnp.zeros((1, 3, 3), int),) * 3, counted, z)
    errors = loss.confidence_errors(slots, counted.astype(jnp.float32))
    sure = [0.75, 0.5, 0.5, 0.5, 0.75]
    accept = [0.5, 0.5, 1.0, 1.0, 0.25]
    gaps = np.subtract(sure, accept)
    products = np.subtract([0.75, 0.375, 0.1875, 0.5, 0.375], [0.5, 0.25, 0.25, 1.0, 0.25])
    assert float(errors["confidence_abs_error"]) == pytest.approx(np.abs(gaps).mean(), abs=1e-6)
    assert float(errors["confidence_bias"]) == pytest.approx(gaps.mean(), abs=1e-6)
    assert float(errors["confidence_cumprod_bias"]) == pytest.approx(products.mean(), abs=1e-6)
    by_slot = loss.acceptance_by_slot(slots)
    np.testing.assert_allclose(by_slot, [0.75, 0.375, 1.0])


def test_training_learns_a_text() -> None:
    """Plain descent fits a text, and what is drawn depends on the key alone."""
    head, params = cases.tiny(ONE, objective=DEEPSPEC, **QUICK)

    def step(params: Any, key: int) -> Any:
        given = batch_of().replace(key=jax.random.key(key))
        (value, _), found = gradients_of(head, params, given)
        trained = head.trainable()
        move = lambda w, g, on: w - 0.1 * jnp.clip(g, -1, 1) if on else w  # noqa: E731
        return jax.tree.map(move, params, found, trained), value

    _, first = step(params, 0)
    assert first == step(params, 0)[1]
    assert first != step(params, 1)[1]
    for key in range(40):
        params, last = step(params, key)
    assert last < 0.6 * first
