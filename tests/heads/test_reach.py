import jax.numpy as jnp
import numpy as np

from specjax.heads import reach

COUNTED = jnp.asarray([[[1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 1, 1]]]) > 0
SHARE = jnp.asarray([[[0.5, 0.5, 1.0], [1.0, 0.25, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]])


def test_chains_written_by_hand() -> None:
    """Chains (.5 .25 .25) and (1 .25 0); the third has nothing that counts, the fourth no start."""
    np.testing.assert_allclose(reach.reach(SHARE, COUNTED), [0.75, 0.25, 0.125])
    thirds = reach.reach(SHARE, COUNTED, COUNTED.any(-1))
    np.testing.assert_allclose(thirds, np.array([1.5, 0.5, 0.25]) / 3)
    assert not reach.reach(SHARE, COUNTED & False).any()


def test_metrics_of_chains() -> None:
    right = SHARE > 0.4
    found = reach.metrics(right, SHARE, COUNTED)
    np.testing.assert_allclose(found["reach_greedy"], [1.0, 0.5, 0.5])
    np.testing.assert_allclose(found["tau_greedy"], 3.0)
    np.testing.assert_allclose(found["tau_probabilistic"], 1 + 0.75 + 0.25 + 0.125)
    assert set(reach.metrics(right, None, COUNTED)) == {"reach_greedy", "tau_greedy"}
