"""nnx modules as heads, and heads as nnx modules."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.core.errors import CheckpointError, PairingError
from specjax.interop.nnx import Bound, from_module, load
from tests.heads.eagle3 import cases
from tests.training import toy

KEPT = np.arange(1, 40, 2)


class Small(nnx.Module):
    """A module with everything that a module may hold."""

    name, taps, max_tokens = "small", (1, 3), 2

    def __init__(self, width: int = 4, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.parts = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.table = nnx.Variable(jnp.arange(3))
        self.still = nnx.Variable(jnp.ones(2))
        self.dropout = nnx.Dropout(0.5)

    def init_state(self, batch: int, capacity: int, dtype: str = "float32") -> Any:
        return jnp.zeros((batch, 4), dtype)

    def observe(self, borrowed: Any, state: Any, obs: Any) -> Any:
        return self.parts[1](self.dropout(state, deterministic=True)) + obs

    def propose(self, borrowed: Any, state: Any, context: Any, num: int) -> Any:
        return state[:, :num]

    def loss(self, borrowed: Any, batch: Any) -> Any:
        return jnp.sum(self.parts[0](batch)), {}


def test_a_module_falls_into_what_is_static_and_its_weights() -> None:
    head, weights = from_module(Small())
    again, others = from_module(Small(seed=1))
    assert head == again and hash(head) == hash(again)  # one program for all weights
    assert head != from_module(Small(width=5))[0]
    assert (head.name, head.taps, head.reads, head.max_tokens) == ("small", (1, 3), (), 2)
    assert weights.keys() == others.keys() == head.specs().keys()
    assert weights["parts.0.kernel"].shape == (4, 4)
    assert "parts.1.kernel float32[4, 4]" in str(head.graph)  # part of a run's fingerprint


def test_parameters_are_trained_and_other_variables_are_not() -> None:
    head, weights = from_module(Small())
    trained = {name for name, wanted in head.trainable().items() if wanted}
    assert trained == {f"parts.{i}.{part}" for i in range(2) for part in ("kernel", "bias")}
    assert {"table", "still"} <= weights.keys() - trained


def test_its_methods_are_the_modules() -> None:
    module = Small()
    head, weights = from_module(module)
    state = head.init_state(2, 8)
    assert state.shape == (2, 4)
    seen = jnp.ones((2, 4))
    made = jax.jit(lambda weights: head.observe(weights, None, state, seen))(weights)
    np.testing.assert_array_equal(made, module.observe(None, state, seen))
    gradient = jax.grad(
        lambda kernel: head.loss({**weights, "parts.0.kernel": kernel}, None, seen)[0]
    )
    np.testing.assert_allclose(gradient(weights["parts.0.kernel"]), np.full((4, 4), 2.0))
    assert head.propose(weights, None, seen, None, 1).shape == (2, 1)


def test_weights_come_back_from_disk(tmp_path: Path) -> None:
    head, weights = from_module(Small())
    head.save(weights, tmp_path)
    again, loaded = load(Small(seed=9), tmp_path)
    assert again == head
    jax.tree.map(np.testing.assert_array_equal, weights, loaded)
    assert loaded["table"].dtype == jnp.int32
    with pytest.raises(CheckpointError, match=r"parts\.0\.kernel"):
        load(Small(width=5), tmp_path)


def test_what_is_no_head_is_refused() -> None:
    with pytest.raises(PairingError, match="Linear is no draft head: no name, taps"):
        from_module(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))  # type: ignore[arg-type]
    random = Small()
    random.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(PairingError, match=r"random stream .*'dropout'.*TrainBatch\.key"):
        from_module(random)


def test_our_heads_are_modules_and_come_back() -> None:
    head, params, lent = cases.tiny(KEPT)
    head = dataclasses.replace(head, config=dataclasses.replace(head.config, ttt_length=2))
    twin, weights = from_module(Bound(head, params))
    wanted = jax.tree.leaves(head.trainable())
    assert list(twin.trainable().values()) == wanted  # the maps of the vocabulary are not
    batch = cases.tiny_batch([9, 12], 12)
    grad = jax.grad(lambda p, h: h.loss(p, lent, batch)[0], allow_int=True)
    ours = cases.jit(grad, static_argnums=1)(params, head)
    theirs = cases.jit(grad, static_argnums=1)(weights, twin)
    for a, variable in zip(jax.tree.leaves(ours), twin.graph.variables, strict=True):
        if variable.trained:
            np.testing.assert_array_equal(a, theirs[variable.name])
    jax.tree.map(np.testing.assert_array_equal, params, Bound(head, params).params())


def test_our_targets_are_modules() -> None:
    target, params = toy.make_target()
    tokens = jnp.arange(6)[None]
    module = Bound(target, params)
    ours = target.forward(params, tokens).hidden
    np.testing.assert_array_equal(module.call("forward", tokens).hidden, ours)
    graph, state = nnx.split(module)
    again = nnx.merge(graph, jax.tree.map(lambda x: x * 0, state))
    assert not np.any(again.call("logits", ours))
