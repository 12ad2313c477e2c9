"""Rules of scheduled verification: plain loops, published numbers, and that none peeks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.verify import schedule


def products(confidence: np.ndarray) -> np.ndarray:
    return np.cumprod(confidence.astype(np.float64), axis=1)


def admitted(a: np.ndarray) -> list[tuple[int, int]]:
    """Candidates (row, draft) in the order of admission, by sorting tuples."""
    found = [(-a[r, j], j, r) for r in range(a.shape[0]) for j in range(a.shape[1]) if a[r, j] > 0]
    return [(r, j) for _, j, r in sorted(found)]


def walk(a: np.ndarray, steps: np.ndarray, stop: bool) -> list[int]:
    """Algorithm 1 of the DSpark paper as a loop; without `stop` the best point of the path."""
    rows = a.shape[0]
    lengths = [0] * rows
    best, best_lengths, tau = rows * steps[rows - 1], list(lengths), float(rows)
    for tokens, (r, j) in enumerate(admitted(a), start=rows + 1):
        if tokens > len(steps):
            break
        tau += a[r, j]
        lengths[r] += 1
        rate = tau * steps[tokens - 1]
        if rate > best:
            best, best_lengths = rate, list(lengths)
        elif stop:
            break
    return best_lengths


def dyadic(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Confidences of few bits: products are exact, and ties happen."""
    return rng.choice([0.0, 0.25, 0.5, 0.75, 1.0], p=[0.1, 0.2, 0.3, 0.2, 0.2], size=shape)


@functools.partial(jax.jit, static_argnums=2)
def both(confidence: jax.Array, steps: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    a = schedule.survival(confidence, jnp.ones(confidence.shape, bool))
    return schedule.early_stop(a, steps, rows), schedule.global_argmax(a, steps, rows)


@pytest.mark.parametrize("size", [14, 9])
def test_both_rules_are_the_published_loop(size: int) -> None:
    rng = np.random.default_rng(size)
    different = 0
    for _ in range(200):
        confidence = dyadic(rng, (3, 4))
        # A staircase of few bits: rates are exact, and equal ones are among them.
        steps = np.sort(rng.choice([1.0, 0.875, 0.75, 0.5], size))[::-1].copy()
        a = products(confidence)
        early, best = both(jnp.asarray(confidence), jnp.asarray(steps), 3)
        assert early.tolist() == walk(a, steps, stop=True)
        assert best.tolist() == walk(a, steps, stop=False)
        different += early.tolist() != best.tolist()
    assert different > 5


def test_published_counterexample() -> None:
    """Appendix A of the paper: the whole path looks at c_2, which knows draft 1."""
    steps = jnp.asarray([1.0, 0.5, 0.45])
    high, low = (both(jnp.asarray([[0.8, c]]), steps, 1) for c in (0.9, 0.0))
    assert [x.tolist() for x in high] == [[0], [2]]
    assert [x.tolist() for x in low] == [[0], [0]]


def test_worked_example() -> None:
    steps = jnp.asarray([10.0, 9.8, 9.5, 9.1, 8.6, 8.0, 7.3, 6.5])
    confidence = jnp.asarray([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]])
    early, best = both(confidence, steps, 2)
    assert early.tolist() == best.tolist() == [3, 1]
    a = schedule.survival(confidence, jnp.ones((2, 3), bool))
    np.testing.assert_allclose(a, [[0.9, 0.72, 0.504], [0.6, 0.3, 0.12]], rtol=1e-6)
    path = [19.6, 27.55, 32.942, 36.292, 37.792, 36.6752, 33.436]
    np.testing.assert_allclose(schedule.throughput(a, steps, 2), path, rtol=1e-6)


def test_no_rule_looks_deeper_than_the_draft_it_decides_on() -> None:
    """Whether draft j is admitted cannot change with the confidences behind it in its row."""
    rng = np.random.default_rng(1)
    rows, drafts = 3, 4
    costs = jnp.asarray(2.0 + np.arange(rows * (drafts + 1)) // 4)
    before = schedule.survival(
        jnp.asarray(rng.uniform(size=(rows, drafts))), jnp.ones((rows, drafts), bool)
    )
    number = schedule.best_budget(before, costs, rows)

    @jax.jit
    def lengths(confidence: jax.Array) -> jax.Array:
        a = schedule.survival(confidence, jnp.ones(confidence.shape, bool))
        return jnp.stack(
            [
                schedule.early_stop(a, 1.0 / costs, rows),
                schedule.admit_top(a, number),
                schedule.above_threshold(confidence, 0.5),
                schedule.global_argmax(a, 1.0 / costs, rows),
            ]
        )

    changed = np.zeros(4, bool)
    for trial in range(150):
        exact = dyadic if trial % 2 else lambda rng, shape: rng.uniform(size=shape)
        confidence = exact(rng, (rows, drafts))
        r, j = rng.integers(rows), rng.integers(drafts)
        other = confidence.copy()
        other[r, j + 1 :] = exact(rng, (1, drafts))[0, : drafts - j - 1]
        one, two = np.asarray(lengths(jnp.asarray(confidence))), np.asarray(lengths(other))
        for rule in range(4):
            changed[rule] |= (one[rule, r] > j) != (two[rule, r] > j)
    assert changed.tolist() == [False, False, False, True]


def test_sure_drafts_stay_in_order_when_products_round() -> None:
    """With confidences of exactly one no deeper product may exceed the one before it."""
    rng = np.random.default_rng(2)
    confidence = np.where(rng.uniform(size=(64, 16)) < 0.5, 1.0, rng.uniform(0.9, 1, (64, 16)))
    confidence[0] = 1.0000001  # as exp(max - logsumexp) may come out
    a = np.asarray(
        jax.jit(schedule.survival)(
            jnp.asarray(confidence, jnp.float32), jnp.ones(confidence.shape, bool)
        )
    )
    assert (np.diff(a, axis=1) <= 0).all() and a.max() == 1.0


def test_closed_slots_and_zeros_are_never_admitted() -> None:
    confidence = jnp.asarray([[0.9, 0.9, 0.9], [0.0, 0.9, 0.9], [0.9, 0.9, 0.9]])
    open_ = jnp.asarray([[True, True, False], [True] * 3, [False] * 3])
    a = schedule.survival(confidence, open_)
    np.testing.assert_allclose(a, [[0.9, 0.81, 0], [0, 0, 0], [0, 0, 0]], rtol=1e-6)
    flat = jnp.ones(12)
    for lengths in (
        schedule.early_stop(a, flat, 2),
        schedule.global_argmax(a, flat, 2),
        schedule.admit_top(a, 9),
    ):
        assert lengths.tolist() == [2, 0, 0]


def test_ties_go_by_position_then_by_row() -> None:
    a = jnp.asarray([[0.5, 0.5], [0.5, 0.5]])
    order = [schedule.admit_top(a, n).tolist() for n in range(5)]
    assert order == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


def test_budget_is_the_best_number_of_tokens_per_cost() -> None:
    rng = np.random.default_rng(3)
    for other in (0, 4):
        confidence = rng.uniform(0.2, 1, (3, 4))
        costs = 2.0 + np.cumsum(rng.uniform(0, 1, 3 + 12 + other))
        a = products(confidence)
        best = np.concatenate([[0], np.cumsum(sorted(a.ravel(), reverse=True))])
        want = (3 + best) / costs[3 + other - 1 + np.arange(13)]
        given = schedule.survival(jnp.asarray(confidence), jnp.ones((3, 4), bool))
        found = schedule.objective(given, jnp.asarray(costs), 3, other)
        np.testing.assert_allclose(found, want, rtol=1e-5)
        budget = schedule.best_budget(given, jnp.asarray(costs), 3, other)
        assert int(budget) == want.argmax()
        lengths = schedule.admit_top(given, budget)
        kept = admitted(a)[: int(budget)]
        assert lengths.tolist() == [sum(r == row for r, _ in kept) for row in range(3)]


def test_a_table_that_ends_ends_admission() -> None:
    a = jnp.asarray([[0.9, 0.8], [0.9, 0.8]])
    assert schedule.early_stop(a, jnp.ones(3), 2).tolist() == [1, 0]
    assert schedule.global_argmax(a, jnp.ones(3), 2).tolist() == [1, 0]
    assert int(schedule.best_budget(a, jnp.ones(4), 2)) == 2


def test_threshold_is_on_each_confidence() -> None:
    confidence = jnp.asarray([[0.9, 0.4, 0.9], [0.5, 0.5, 0.5], [0.1, 1.0, 1.0]])
    assert schedule.above_threshold(confidence, 0.5).tolist() == [1, 3, 0]
    assert schedule.above_threshold(confidence, 0.0).tolist() == [3, 3, 3]


def test_no_drafts_and_no_rows() -> None:
    empty = schedule.survival(jnp.zeros((2, 0)), jnp.zeros((2, 0), bool))
    assert schedule.early_stop(empty, jnp.ones(2), 2).tolist() == [0, 0]
    idle = jnp.zeros((2, 3))
    assert schedule.early_stop(idle, jnp.ones(8), 0).tolist() == [0, 0]
    assert int(schedule.best_budget(idle, jnp.ones(8), 0)) == 0
