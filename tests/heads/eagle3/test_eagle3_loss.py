"""The training-time test against the references, and the promises of its loss."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.params import leaves_with_names
from specjax.heads import pieces
from specjax.heads.base import TrainBatch
from specjax.heads.eagle3 import loss as ttt
from specjax.heads.eagle3.network import draft_logits, fuse
from specjax.heads.objective_config import Objective
from specjax.heads.vocabulary import kept_ids
from specjax.layers.linear import linear_f32
from specjax.layers.norm import rms_norm
from tests.heads.eagle3 import cases

ALL = Objective(terms=("soft_ce",), normaliser="all")
KEPT = np.sort(np.random.default_rng(1).permutation(cases.VOCAB)[:12])


def check_steps(case: cases.Case, outs: list[jax.Array], slots: ttt.Compared) -> int:
    """Compare every stored tensor of every step; returns how many there were."""
    count, rule = 0, case.head.config.objective
    _, losses = ttt.weigh(case.head, slots)
    for s, hidden in enumerate(outs):
        logits = draft_logits(case.head, case.params, case.borrowed, hidden)
        counted = slots.counted[..., s]
        found = {
            "hidden": hidden,
            "logits": logits,
            "pred_ids": jnp.argmax(logits, -1),
            "position_mask": counted,
            "ce": jnp.where(counted, slots.terms[rule.terms[0]][..., s], 0.0),
            "accept_rate": jnp.where(counted, slots.accept[..., s], 0.0),
            "correct": slots.correct[..., s],
            "loss": losses[s],
            "accuracy": slots.accuracy[s],
            "mean_accept_rate": slots.acceptance[s],
        }
        for key, value in found.items():
            if (name := f"train.step{s}.{key}") in case.tensors:
                cases.agree(name, value, case.tensors[name])
                count += 1
        # Rows that have moved past the end are not compared; of the others this is the best token.
        inside = slots.pred[:, : slots.pred.shape[1] - s, s]
        np.testing.assert_array_equal(inside, found["pred_ids"][:, : inside.shape[1]])
    return count


def check_gradients(case: cases.Case, gradients: object, prefix: str) -> int:
    """Compare every stored gradient; returns how many there were."""
    count = 0
    named = zip(leaves_with_names(case.head.specs()), jax.tree.leaves(gradients), strict=True)
    for (_, spec), gradient in named:
        if (name := f"{prefix}.grad.{spec.hf}") in case.tensors:
            cases.agree(name, gradient, case.tensors[name], gradient=True)
            count += 1
    assert count == sum(name.startswith(f"{prefix}.grad.") for name in case.tensors)
    return count


@pytest.mark.parametrize(("name", "grads"), [("eagle3_llama", 13), ("eagle3_qwen3", 14)])
def test_every_step_and_gradient_agrees(name: str, grads: int) -> None:
    case = cases.case(name)
    x = case.tensors

    @partial(jax.value_and_grad, has_aux=True, allow_int=True)
    def run(params, borrowed, batch):
        rows = ttt.rows_of(batch)
        outs = ttt.unroll(case.head, params, borrowed, rows)
        slots = ttt.compare(case.head, params, borrowed, rows, outs)
        return ttt.weigh(case.head, slots)[0], (outs, slots, ttt.chains(slots))

    batch = case.batch()
    (loss, (outs, slots, lengths)), gradients = cases.jit(run)(case.params, case.borrowed, batch)
    cases.agree("loss", loss, x["train.loss"])
    assert check_steps(case, outs, slots) > 50
    assert check_gradients(case, gradients, "train") == grads
    cases.agree("fused", fuse(case.head, case.params, batch.taps), x["train.fused_hidden"])
    if "train.tau_greedy" in x:
        cases.agree("tau_greedy", lengths["tau_greedy"], x["train.tau_greedy"])
        cases.agree("tau_probabilistic", lengths["tau_probabilistic"], x["train.tau_probabilistic"])


@pytest.mark.parametrize("kind", ["lk_alpha", "lk_lambda"])
def test_lk_losses_agree(kind: str) -> None:
    case = cases.case("eagle3_llama")
    rule = dataclasses.replace(case.head.config.objective, terms=(kind,))
    config = dataclasses.replace(case.head.config, objective=rule)
    head = dataclasses.replace(case.head, config=config)
    run = cases.jit(jax.value_and_grad(head.loss, has_aux=True, allow_int=True))
    (loss, metrics), gradients = run(case.params, case.borrowed, case.batch())
    cases.agree("loss", loss, case.tensors[f"train.{kind}.loss"])
    steps = np.array([metrics[f"loss_{s}"] for s in range(7)])
    cases.agree("steps", steps, case.tensors[f"train.{kind}.step_losses"])
    assert check_gradients(case, gradients, f"train.{kind}") == 1


def test_packed_documents_agree() -> None:
    case = cases.case("eagle3_speculators")
    x, head = case.tensors, case.head
    documents = [(x[f"train.doc{i}.input_ids"], x[f"train.doc{i}.loss_mask"]) for i in range(2)]
    packed = ttt.pack(documents, 36)
    for name, value in packed.items():
        cases.agree(name, value, x[f"train.packed.{name}"])
    final = jnp.asarray(case.target["model.norm.weight"])
    rows = ttt.Rows(
        taps=case.taps(x["train.packed.hidden_states"]),
        tokens=jnp.asarray(packed["input_ids"]),
        hidden=rms_norm(jnp.asarray(x["train.packed.verifier_last_hidden_states"]), final, 1e-6),
        counted=jnp.asarray(packed["loss_mask"]),
        positions=jnp.asarray(packed["position_ids"]),
        lengths=jnp.asarray([33]),
        documents=jnp.asarray(packed["document_ids"]),
    )

    @partial(jax.value_and_grad, has_aux=True, allow_int=True)
    def run(params, borrowed, rows):
        logits = ttt.teach(head, borrowed, rows.hidden, kept_ids(params))[0]
        outs = ttt.unroll(head, params, borrowed, rows)
        slots = ttt.compare(head, params, borrowed, rows, outs, across_documents=True)
        return ttt.weigh(head, slots)[0], (outs, slots, logits)

    (loss, (outs, slots, logits)), gradients = cases.jit(run)(case.params, case.borrowed, rows)
    cases.agree("logits", logits, x["train.target_logits"])
    cases.agree("loss", loss, x["train.loss"])
    # The library's own mask, open to every later key, gives 1.213205 (DRAFTS 2.1).
    assert abs(float(loss) - 3.601783) < 1e-4
    assert check_steps(case, outs, slots) > 10
    assert check_gradients(case, gradients, "train") == 15
    full, conditional = ttt.chain_accuracy(slots)
    for s in range(4):
        cases.agree("full_acc", full[s], x[f"train.step{s}.full_acc"])
        cases.agree("cond_acc", conditional[s], x[f"train.step{s}.cond_acc"])


def test_documents_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="4 columns"):
        ttt.pack([(np.arange(6), np.ones(6))], 4)


def loss_of(gradient: bool = True, **config: object):
    head, params, borrowed = cases.tiny(KEPT, **{"ttt_length": 2, **config})
    loss = jax.value_and_grad(head.loss, has_aux=True, allow_int=True) if gradient else head.loss
    run = cases.jit(loss)
    return lambda batch: run(params, borrowed, batch)


def padded(batch: TrainBatch, pads: int) -> TrainBatch:
    """Append padding that holds garbage."""
    more = cases.tiny_batch([pads], pads, seed=9)
    return TrainBatch(
        tokens=jnp.concatenate([batch.tokens, more.tokens], 1),
        loss_mask=jnp.concatenate([batch.loss_mask, more.loss_mask], 1),
        lengths=batch.lengths,
        hidden=jnp.concatenate([batch.hidden, more.hidden * 50], 1),
        taps=jnp.concatenate([batch.taps, more.taps * 50], 2),
        key=batch.key,
    )


def same_gradients(one: object, other: object) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if a.dtype == jnp.float32:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_padding_changes_neither_loss_nor_gradient() -> None:  # F22
    batch = cases.tiny_batch([10], 10)
    run = loss_of()
    (short, _), short_gradient = run(batch)
    (long, _), long_gradient = run(padded(batch, 40))
    assert short > 0.5
    np.testing.assert_allclose(short, long, rtol=1e-5)
    same_gradients(short_gradient, long_gradient)
    per_position, _ = loss_of(gradient=False, objective=ALL)(padded(batch, 40))
    assert per_position < short / 3  # the published convention, which makes short texts weigh less


def test_a_second_length_is_not_masked_like_the_first() -> None:  # F29
    run = loss_of(gradient=False)
    first, _ = run(cases.tiny_batch([16, 12], 16))
    longer = cases.tiny_batch([24, 24], 24)
    after, metrics = run(longer)
    alone, fresh = loss_of(gradient=False)(longer)
    assert first != after
    np.testing.assert_allclose(after, alone, rtol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, fresh[name], rtol=1e-6)


def test_the_text_is_fed_whatever_the_head_guessed() -> None:  # F23
    """Documented choice: step s is fed x_{i+1+s}, the last token of its teacher's prefix."""
    head, params, borrowed = cases.tiny(KEPT, ttt_length=3)
    batch = cases.tiny_batch([12], 12)
    rows = ttt.rows_of(batch)

    @cases.jit
    def run(params, rows):
        outs = ttt.unroll(head, params, borrowed, rows)
        return outs, ttt.compare(head, params, borrowed, rows, outs).pred

    right, guesses = run(params, rows)
    wrong, others = run(dataclasses.replace(params, output=-params.output), rows)
    assert np.all(guesses[0, :8] != others[0, :8])
    for a, b in zip(right, wrong, strict=True):
        np.testing.assert_array_equal(a, b)
    i, s = 4, 2
    assert ttt.shift(rows.tokens, s)[0, i] == batch.tokens[0, i + 1 + s]
    teacher = ttt.teach(head, borrowed, rows.hidden, kept_ids(params))[0]
    known = linear_f32(batch.hidden[0, i + 1 + s], borrowed.output)[KEPT]
    np.testing.assert_allclose(ttt.shift(teacher, s)[0, i], known, rtol=1e-4, atol=1e-4)
    other = dataclasses.replace(rows, tokens=rows.tokens.at[0, i + s].add(1) % cases.VOCAB)
    changed, _ = run(params, other)
    assert np.any(changed[s][0, i] != right[s][0, i])
    np.testing.assert_array_equal(changed[s - 1][0, i], right[s - 1][0, i])


def test_a_row_sees_no_other_rows_later_steps() -> None:
    head, params, borrowed = cases.tiny(KEPT, ttt_length=3)
    rows = ttt.rows_of(cases.tiny_batch([12], 12))
    unroll = cases.jit(partial(ttt.unroll, head))
    base = unroll(params, borrowed, rows)
    # Row 6's tapped state enters step 0 of rows 6 and later, and nothing of the rows before.
    moved = dataclasses.replace(rows, taps=rows.taps.at[:, 0, 6].multiply(-3.0))
    for before, after in zip(base, unroll(params, borrowed, moved), strict=True):
        np.testing.assert_array_equal(before[0, :6], after[0, :6])
        assert np.any(before[0, 6] != after[0, 6])


@pytest.mark.parametrize("kind", ["soft_ce", "lk_alpha", "lk_lambda"])
def test_a_batch_without_supervision_gives_zero(kind: str) -> None:
    batch = cases.tiny_batch([8, 0], 8)
    run = loss_of(objective=Objective(terms=(kind,)), ttt_length=1)
    (loss, metrics), gradients = run(
        dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    )
    assert loss == 0
    assert all(np.isfinite(value) for value in metrics.values())
    for leaf in jax.tree.leaves(gradients):
        if leaf.dtype == jnp.float32:
            assert np.all(np.isfinite(leaf))
            assert not np.any(leaf)


@pytest.mark.parametrize("kind", ["soft_ce", "lk_alpha"])
def test_the_gradient_is_the_slope(kind: str) -> None:
    head, params, borrowed = cases.tiny(
        KEPT, ttt_length=2, objective=Objective(terms=(kind,)), in_vocab_only=False
    )
    batch = cases.tiny_batch([9, 7], 9)
    run = cases.jit(jax.value_and_grad(head.loss, has_aux=True, allow_int=True))
    _, gradient = run(params, borrowed, batch)
    on = jax.tree.map(lambda x: x.dtype == jnp.float32, gradient)
    norm = jnp.sqrt(
        sum(
            jnp.sum(g**2)
            for g, use in zip(*map(jax.tree.leaves, (gradient, on)), strict=True)
            if use
        )
    )

    def moved(by: float) -> jax.Array:
        along = jax.tree.map(
            lambda p, g, use: p + by * g / norm if use else p, params, gradient, on
        )
        return run(along, borrowed, batch)[0][0]

    by = 2e-3
    np.testing.assert_allclose((moved(by) - moved(-by)) / (2 * by), norm, rtol=2e-2)


def test_recomputing_steps_changes_nothing() -> None:
    batch = cases.tiny_batch([9, 7], 9)
    (kept, _), one = loss_of(remat=False)(batch)
    (again, _), other = loss_of(remat=True)(batch)
    np.testing.assert_allclose(kept, again, rtol=1e-6)
    same_gradients(one, other)


def test_the_teacher_of_a_draft_vocabulary() -> None:
    head, _, borrowed = cases.tiny(KEPT)
    hidden = cases.tiny_batch([9, 7], 9).hidden
    shown, top, mass = ttt.teach(head, borrowed, hidden, jnp.asarray(KEPT))
    logits = linear_f32(hidden, borrowed.output)
    np.testing.assert_array_equal(shown, logits[..., KEPT])
    np.testing.assert_array_equal(top, jnp.argmax(logits, -1))
    np.testing.assert_allclose(mass, jax.nn.softmax(logits)[..., KEPT].sum(-1), rtol=1e-5)


@pytest.mark.parametrize("kept", [KEPT, None], ids=["draft vocabulary", "all"])
def test_f72_pieces_change_nothing(kept: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """F72: logits a few positions at a time: the same loss, metrics and gradients."""
    head, params, borrowed = cases.tiny(kept, ttt_length=3)  # type: ignore[arg-type]
    batch = cases.tiny_batch([11, 6], 12)

    def run():
        loss = lambda *given: head.loss(*given)  # noqa: E731  (a program of its own)
        return cases.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))(
            params, borrowed, batch
        )

    want = run()
    monkeypatch.setattr(pieces, "ELEMENTS", 5 * 2 * 4 * cases.VOCAB)
    for one, two in zip(jax.tree.leaves(run()), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("mask_shift", "first"), [(0, 5), (1, 4), (2, 3)])
def test_which_rows_count(mask_shift: int, first: int) -> None:
    batch = cases.tiny_batch([9, 0], 12)
    mask = (jnp.arange(12)[None] >= 5) & jnp.ones((2, 1), bool)
    rows = ttt.rows_of(dataclasses.replace(batch, loss_mask=mask), mask_shift)
    # The last row that counts needs a token after it, and for shift 2 the one it predicts.
    last = {0: 7, 1: 7, 2: 6}[mask_shift]
    assert np.flatnonzero(rows.counted[0]).tolist() == list(range(first, last + 1))
    assert not np.any(rows.counted[1])
