"""Training Gemma 4 MTP: rows are rounds, alignment, masks, weights, gradients."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.heads import pieces
from specjax.heads.base import TrainBatch
from specjax.heads.gemma4_mtp.network import query_positions, step, tables_at, visible_keys
from specjax.heads.objective import Objective
from tests.decode.adversary import VOCAB, WINDOW, tiny
from tests.heads.gemma4_mtp import cases

LENGTHS, WIDTH, STEPS = [17, 9], 18, 3
TERMS = Objective(terms=("hard_ce", "kl_div"), factors=(1.0, 0.5))


@dataclasses.dataclass(frozen=True)
class Setup:
    target: Any
    weights: Any
    head: Any
    params: Any
    borrowed: Any
    batch: TrainBatch
    value: Any  # compiled loss and gradient


def setup(**config: Any) -> Setup:
    target, weights = tiny("gemma4")
    settings = {"steps": STEPS, "remat": False, "step_loss_decay": 0.5, **config}
    head, params, borrowed = cases.on_target(target, weights, **settings)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, WIDTH)), jnp.int32)
    batch = cases.jit(lambda w: cases.batch_of(target, w, head, tokens, LENGTHS))(weights)
    value = cases.jit(jax.value_and_grad(head.loss, has_aux=True, allow_int=True))
    return Setup(target, weights, head, params, borrowed, batch, value)


@pytest.fixture(scope="module")
def case() -> Setup:
    return setup(objective=TERMS, centroids=8, centroid_top_k=2, centroid_factor=0.25)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def rounds_one_by_one(case: Setup) -> list[list[dict[str, float]]]:
    """Terms of every row that counts, per step, from rounds on caches as decoding makes them."""
    head, params, borrowed = case.head, case.params, case.borrowed
    tokens, batch, target = case.batch.tokens, case.batch, case.target
    p = jax.tree.map(np.asarray, params)

    @cases.jit
    def states(weights: Any, row: jax.Array, length: jax.Array) -> Any:
        """States of a round's steps, the text's tokens fed; the newest token is at length - 1."""
        text = jnp.take(tokens, row[None], axis=0)
        state, context = cases.from_scratch(target, weights, head, text, length[None])
        keys = visible_keys(head, context.keys, context.position)
        tables = tables_at(head, query_positions(head, context.position)[:, None])
        carried, out = state.hidden[:, None], []
        for k in range(STEPS):
            fed = jax.lax.dynamic_slice_in_dim(text, length - 1 + k, 1, axis=1)
            done = step(head, params, borrowed, fed, carried, tables, keys)
            carried = done.state
            out.append(done.hidden[0, 0])
        return jnp.stack(out)

    teachers = np.asarray(batch.hidden, np.float64) @ np.asarray(borrowed.output, np.float64).T
    teachers = softmax(20 * np.tanh(teachers / 20))  # F13: the target's cap
    steps: list[list[dict[str, float]]] = [[] for _ in range(STEPS)]
    for row, length in enumerate(LENGTHS):
        for newest in range(1, length):
            hidden = None
            for k in range(STEPS):
                label = newest + 1 + k
                if label >= length or not batch.loss_mask[row, label]:
                    continue
                if hidden is None:
                    hidden = states(case.weights, jnp.int32(row), jnp.int32(newest + 1))
                y = np.asarray(hidden, np.float64)[k]
                q, teacher = softmax(p.embedding @ y), teachers[row, newest + k]
                scores, size = softmax(p.clusters.centroids @ y), VOCAB // 8
                token = int(tokens[row, label])
                place = p.clusters.ordering.tolist().index(token) // size
                steps[k].append({
                    "row": row, "newest": newest,
                    "hard_ce": -math.log(q[token]),
                    "kl_div": float((teacher * np.log(teacher / q)).sum()),
                    "accept": float(np.minimum(teacher, q).sum()),
                    "correct": float(teacher.argmax() == q.argmax()),
                    "cluster": -math.log(scores[place]),
                    "found": float((scores > scores[place]).sum() < 2),
                })  # fmt: skip
    return steps


def test_rows_are_rounds(case: Setup, rounds_one_by_one: list[list[dict[str, float]]]) -> None:
    (loss, metrics), _ = case.value(case.params, case.borrowed, case.batch)
    total, weights = 0.0, [0.5**k for k in range(STEPS)]
    for k, rows in enumerate(rounds_one_by_one):
        mean = {name: np.mean([row[name] for row in rows]) for name in rows[0]}
        plain = mean["hard_ce"] + 0.5 * mean["kl_div"]
        assert float(metrics[f"loss_{k}"]) == pytest.approx(plain, rel=1e-4)
        assert float(metrics[f"acceptance_{k}"]) == pytest.approx(mean["accept"], rel=1e-4)
        assert float(metrics[f"accuracy_{k}"]) == pytest.approx(mean["correct"], abs=1e-6)
        total += weights[k] / sum(weights) * (plain + 0.25 * mean["cluster"])
    assert float(loss) == pytest.approx(total, rel=1e-4)
    first = rounds_one_by_one[0]
    assert float(metrics["counted"]) == len(first) == sum(LENGTHS) - 2 * 3
    found = np.mean([row["found"] for row in first])
    assert float(metrics["clusters_found"]) == pytest.approx(found)
    assert max(row["newest"] for row in first) > WINDOW  # some keys are out of the window


def test_expected_tokens_of_a_round(
    case: Setup, rounds_one_by_one: list[list[dict[str, float]]]
) -> None:
    (_, metrics), _ = case.value(case.params, case.borrowed, case.batch)
    reach = {}
    for rows in rounds_one_by_one:
        reach |= {
            (r["row"], r["newest"]): [*reach.get((r["row"], r["newest"]), []), r["accept"]]
            for r in rows
        }
    # Rounds whose first label is part of the prompt do not count, whatever follows.
    counted = {(r["row"], r["newest"]) for r in rounds_one_by_one[0]}
    lengths = [1 + np.cumprod(reach[key]).sum() for key in counted]
    assert float(metrics["tau_probabilistic"]) == pytest.approx(np.mean(lengths), rel=1e-4)


def test_padding_and_prompts_have_no_part(case: Setup) -> None:
    (loss, _), gradient = case.value(case.params, case.borrowed, case.batch)
    batch = case.batch
    pad = jnp.arange(WIDTH)[None] >= batch.lengths[:, None]
    other = dataclasses.replace(
        batch,
        tokens=jnp.where(pad, VOCAB - 1, batch.tokens),
        hidden=jnp.where(pad[..., None], 7.0, batch.hidden),
        keys=jax.tree.map(lambda a: jnp.where(pad[:, None, :, None], 7.0, a), batch.keys),
        loss_mask=batch.loss_mask | pad,
    )
    (again, _), same = case.value(case.params, case.borrowed, other)
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    np.testing.assert_allclose(same.pre, gradient.pre, atol=1e-6)
    nothing = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    (none, metrics), zero = case.value(case.params, case.borrowed, nothing)
    assert (float(none), float(metrics["counted"]), float(metrics["tau_greedy"])) == (0, 0, 1)
    assert all(np.isfinite(x).all() and not x.any() for x in jax.tree.leaves(zero.layers))


def test_every_trained_weight_has_a_gradient(case: Setup) -> None:
    _, gradient = case.value(case.params, case.borrowed, case.batch)
    trained = case.head.trainable()
    flags = jax.tree.leaves(trained)
    assert sum(flags) == len(flags) - len(case.head.layers) - 1  # layer scalars, token order
    for part, on in zip(jax.tree.leaves(gradient), flags, strict=True):
        assert not on or float(jnp.abs(part).max()) > 0


def test_the_gradient_is_that_of_the_loss(case: Setup) -> None:
    _, gradient = case.value(case.params, case.borrowed, case.batch)
    slope = float(jnp.linalg.norm(gradient.post))
    direction = gradient.post / slope

    def at(by: float) -> float:
        moved = dataclasses.replace(case.params, post=case.params.post + by * direction)
        return float(case.value(moved, case.borrowed, case.batch)[0][0])

    # Only later steps see the carried state, so this also says that it carries a gradient.
    assert (at(1e-2) - at(-1e-2)) / 2e-2 == pytest.approx(slope, rel=0.05)


def test_pieces_and_recomputing_change_nothing(
    case: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    (loss, metrics), gradient = case.value(case.params, case.borrowed, case.batch)
    monkeypatch.setattr(pieces, "ELEMENTS", 4 * 2 * VOCAB)
    head = dataclasses.replace(case.head, config=dataclasses.replace(case.head.config, remat=True))
    value = cases.jit(jax.value_and_grad(head.loss, has_aux=True, allow_int=True))
    (again, same), other = value(case.params, case.borrowed, case.batch)
    np.testing.assert_allclose(again, loss, rtol=1e-5)
    assert metrics.keys() == same.keys()
    np.testing.assert_allclose(other.embedding, gradient.embedding, atol=1e-5)
