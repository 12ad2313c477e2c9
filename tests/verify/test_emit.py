"""Stop tokens, budgets, finished rows and the statistics of a cut block."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.verify import contains_stop, cut_at_stop, tally

TOKENS = jnp.asarray([[5, 7, 9, 4, 0]])


@pytest.mark.parametrize(
    ("accepted", "stops", "budget", "done", "emitted", "kept", "counted"),
    [
        pytest.param(3, (), 9, False, 4, 3, 4, id="no-cut"),
        pytest.param(3, (7,), 9, False, 2, 2, 2, id="F51-stop-inside"),
        pytest.param(3, (9, 7), 9, False, 2, 2, 2, id="F51-first-of-two"),
        pytest.param(3, (5,), 9, False, 1, 1, 1, id="F51-stop-first"),
        pytest.param(3, (4,), 9, False, 4, 3, 4, id="stop-is-the-next-token"),
        pytest.param(1, (9, 0), 9, False, 2, 1, 4, id="stop-behind-the-accepted"),
        pytest.param(3, (), 2, False, 2, 2, 2, id="budget-inside"),
        pytest.param(3, (), 4, False, 4, 3, 4, id="budget-exact"),
        pytest.param(3, (9,), 1, False, 1, 1, 1, id="budget-before-stop"),
        pytest.param(3, (), 0, False, 0, 0, 0, id="budget-spent"),
        pytest.param(3, (7,), 9, True, 0, 0, 0, id="done"),
        pytest.param(0, (), 9, False, 1, 0, 4, id="nothing-accepted"),
    ],
)
def test_cut(accepted, stops, budget, done, emitted, kept, counted):
    """Each of the three limits alone and together, with what the statistics see."""
    one = lambda x: jnp.asarray([x])  # noqa: E731
    got = cut_at_stop(TOKENS, one(accepted), stops, one(budget), one(done))
    assert int(got[0]) == emitted
    assert [int(x[0]) for x in tally(one(accepted), one(4), got)] == [kept, counted]
    ended = bool(contains_stop(TOKENS, got, stops)[0])
    assert ended == any(int(t) in stops for t in TOKENS[0, :emitted])


def test_plain_decoding_is_the_case_without_drafts():
    """F59: one token a round, until the stop token or the last of the budget."""
    tokens = jnp.asarray([[3], [2], [3]])
    got = cut_at_stop(tokens, jnp.zeros(3, int), (2,), jnp.asarray([1, 5, 0]), jnp.zeros(3, bool))
    np.testing.assert_array_equal(got, [1, 1, 0])
    np.testing.assert_array_equal(contains_stop(tokens, got, (2,)), [False, True, False])
