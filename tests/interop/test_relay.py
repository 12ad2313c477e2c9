"""The worked example of docs/add_a_head.md: one file and one configuration, and its nnx twin."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from docs.relay import relay
from docs.relay.relay_nnx import RelayModule
from specjax import targets
from specjax.decode import Engine, EngineConfig, Request
from specjax.heads.base import TrainBatch, borrow
from specjax.interop.nnx import from_module
from specjax.training.config import OptimConfig
from specjax.training.trainer import Trainer
from tests.training import toy
from tests.training.files import write_target

CONFIG = relay.RelayConfig(width=24, steps=2)
REQUESTS = [Request((i + 3, 2 * i + 5, 11, 4), 12) for i in range(3)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the example's own command."""
    root = tmp_path_factory.mktemp("relay")
    write_target(root / "target")
    with (root / "answers.jsonl").open("w") as file:
        for i in range(24):
            said = [("user", f"and {i}?"), ("assistant", "the answer is four, of course. " * 2)]
            rows = [{"role": role, "content": text} for role, text in said]
            file.write(json.dumps({"messages": rows}) + "\n")
    words = [f"--target={root / 'target'}", f"--data={root / 'answers.jsonl'}"]
    words += [f"--out={root / 'run'}", "Relay.width=32", "Relay.steps=2", "Trainer.steps=12"]
    words += ["Data.max_length=64", "Data.lengths=(64,)", "Data.holdout=4", "Optim.lr=0.02"]
    words += ["Trainer.target_dtype='float32'", "Trainer.compute_dtype='float32'"]
    assert relay.main(words) == 0
    return root


def test_it_learns(trained: Path) -> None:
    log = [json.loads(line) for line in (trained / "run" / "train.jsonl").open()]
    assert len(log) == 12 and log[-1]["loss"] < 0.7 * log[0]["loss"]
    assert log[-1]["tau_greedy"] > log[0]["tau_greedy"]


def test_it_decodes_losslessly(trained: Path) -> None:
    target, params = targets.load(trained / "target", "float32")
    head, weights = relay.load(trained / "run" / "head", target.info)
    assert head.config.width == 32
    plain = Engine(target, params, config=EngineConfig(capacity=64)).generate(REQUESTS)
    config = EngineConfig(num_speculative_tokens=2, concurrency=3, capacity=64)
    drafted = Engine(target, params, head, weights, config).generate(REQUESTS)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]


def twins(info: Any) -> tuple[Any, Any, Any, Any]:
    """Return (head, weights, nnx head, the same weights)."""
    head = relay.RelayHead.for_target(info, CONFIG)
    params = head.init(jax.random.key(4))
    noise = jax.random.normal(jax.random.key(5), (info.hidden,))
    params = dataclasses.replace(params, state_norm=1 + 0.1 * noise, up=params.up * 10)
    module = RelayModule(info, CONFIG, rngs=nnx.Rngs(0))
    twin, weights = from_module(module)
    given = {
        "state_norm.scale": params.state_norm,
        "token_norm.scale": params.token_norm,
        "up.kernel": params.up.T,
        "down.kernel": params.down.T,
    }
    assert weights.keys() == given.keys()
    return head, params, twin, given


def test_the_nnx_twin_gives_the_same_losses_and_gradients() -> None:
    target, params = toy.make_target()
    head, weights, twin, others = twins(target.info)
    lent = borrow(target, params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 90, (2, 12)), jnp.int32)
    batch = TrainBatch(
        tokens=tokens,
        loss_mask=jnp.arange(12)[None] >= jnp.asarray([[3], [5]]),
        lengths=jnp.asarray([12, 9]),
        hidden=target.forward(params, tokens).hidden,
        taps=jnp.zeros((0, 2, 12, target.info.hidden)),
        key=jax.random.key(0),
    )
    value = jax.jit(jax.value_and_grad(lambda w, h: h.loss(w, lent, batch)[0]), static_argnums=1)
    (ours, a), (theirs, b) = value(weights, head), value(others, twin)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(a.up, b["up.kernel"].T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(a.token_norm, b["token_norm.scale"], rtol=1e-4, atol=1e-6)


def test_the_nnx_twin_trains_and_decodes_alike(tmp_path: Path) -> None:
    target, params = toy.make_target()
    head, weights, twin, others = twins(target.info)
    losses, texts = [], []
    for name, each, start in (("pure", head, weights), ("nnx", twin, others)):
        config = toy.make_config(tmp_path / name, steps=4, optim=OptimConfig(lr=1e-2))
        outcome = Trainer(config, target, params, each, start, toy.make_batches()).run()
        log = (tmp_path / name / "run" / "train.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in log])
        settings = EngineConfig(num_speculative_tokens=3, concurrency=3, capacity=64)
        engine = Engine(target, params, each, outcome.params, settings)
        results = engine.generate(REQUESTS)
        texts.append([(r.token_ids, r.accepted, r.rounds) for r in results])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
    for (ids, accepted, rounds), (ids2, accepted2, rounds2) in zip(*texts, strict=True):
        assert ids == ids2 and rounds == rounds2  # the same drafts were accepted
        np.testing.assert_array_equal(accepted, accepted2)


def test_packed_texts_do_not_see_each_other() -> None:
    target, params = toy.make_target()
    head, weights, *_ = twins(target.info)
    lent = borrow(target, params)
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(3, 90, (1, 12)), jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(1, 12, target.info.hidden)), jnp.float32)
    documents = jnp.asarray([[0] * 7 + [1] * 5])
    batch = TrainBatch(
        tokens=tokens,
        loss_mask=jnp.ones((1, 12), bool),
        lengths=jnp.asarray([12]),
        hidden=hidden,
        taps=hidden[None][:0],
        key=jax.random.key(0),
        documents=documents,
        positions=jnp.asarray([[*range(7), *range(5)]]),
    )
    # The state of the first text's last token belongs to no prediction.
    changed = batch.replace(hidden=hidden.at[0, 5:7].add(9.0))
    assert head.loss(weights, lent, batch)[0] == head.loss(weights, lent, changed)[0]
