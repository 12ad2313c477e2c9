import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.config import OptimConfig
from specjax.training.optim import optimizer, schedule


def test_schedule_rises_then_falls() -> None:
    config = OptimConfig(lr=1.0, warmup=0.1, schedule="cosine", final=0.1)
    rate = schedule(config, 100)
    np.testing.assert_allclose([rate(0), rate(5), rate(10)], [1 / 11, 6 / 11, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rate(55), 0.1 + 0.9 * 0.5, rtol=1e-6)
    np.testing.assert_allclose(rate(100), 0.1, rtol=1e-5)


@pytest.mark.parametrize(("name", "middle", "last"), [("linear", 0.5, 0.0), ("constant", 1, 1)])
def test_other_schedules(name: str, middle: float, last: float) -> None:
    rate = schedule(OptimConfig(lr=1.0, warmup=0.0, schedule=name), 100)
    np.testing.assert_allclose([rate(0), rate(50), rate(100)], [1.0, middle, last], atol=1e-6)


def test_adamw_by_hand() -> None:
    config = OptimConfig(
        lr=0.1, warmup=0.0, schedule="constant", weight_decay=0.5, clip=0.0, betas=(0.9, 0.95)
    )
    params = {"w": jnp.full((2, 2), 2.0), "v": jnp.full((2,), 2.0)}
    grads = {"w": jnp.full((2, 2), 3.0), "v": jnp.full((2,), -4.0)}
    rule = optimizer(config, 10)
    updates, _ = rule.update(grads, rule.init(params), params)
    # The first Adam step is the gradient's sign; decay takes lr * 0.5 * 2 of matrices only.
    np.testing.assert_allclose(updates["w"], -0.1 * (1 + 0.5 * 2.0), rtol=1e-5)
    np.testing.assert_allclose(updates["v"], 0.1, rtol=1e-5)


def test_clip() -> None:
    config = OptimConfig(lr=1.0, warmup=0.0, schedule="constant", clip=1.0, eps=1e6)
    params = {"w": jnp.zeros((2,))}
    rule = optimizer(config, 10)
    # With a huge eps the update is proportional to the gradient, so clipping shows.
    small, _ = rule.update({"w": jnp.array([0.6, 0.8])}, rule.init(params), params)
    large, _ = rule.update({"w": jnp.array([60.0, 80.0])}, rule.init(params), params)
    np.testing.assert_allclose(small["w"], large["w"], rtol=1e-5)


def test_muon_orthogonalises_matrices() -> None:
    config = OptimConfig(name="muon", lr=1.0, warmup=0.0, schedule="constant", clip=0.0)
    params = {"w": jnp.zeros((8, 8)), "v": jnp.zeros((8,))}
    grads = {"w": jax.random.normal(jax.random.key(0), (8, 8)), "v": jnp.ones((8,))}
    rule = optimizer(config, 10)
    updates, _ = rule.update(grads, rule.init(params), params)
    singular = np.linalg.svd(np.asarray(updates["w"]), compute_uv=False)
    assert singular.max() / singular.min() < 2 < np.linalg.cond(np.asarray(grads["w"]))
    assert float(updates["v"][0]) < 0 == float(np.ptp(updates["v"]))  # AdamW: the sign only
