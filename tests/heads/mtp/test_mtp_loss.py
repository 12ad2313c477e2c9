"""MTP training: each step anew in float64, gradients, what counts, and other loss terms."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import ConfigError
from specjax.heads.base import TrainBatch
from specjax.heads.objective_config import Objective
from tests.heads.mtp import cases

LENGTHS, WIDTH = (14, 9, 2), 14


def batch(seed: int = 0, spoil: bool = False) -> TrainBatch:
    """Texts of uneven lengths; with `spoil` what stands in the padding is other garbage."""
    rng, rows = np.random.default_rng(seed), len(LENGTHS)
    text, at = cases.texts(rows, WIDTH), np.arange(WIDTH)[None]
    real = at < np.asarray(LENGTHS)[:, None]
    tokens, hidden = text.tokens[:, :WIDTH], text.hidden
    if spoil:
        tokens = np.where(real, tokens, (tokens + 7) % cases.VOCAB)
        hidden = np.where(real[..., None], hidden, 50.0)
    return TrainBatch(
        tokens=jnp.asarray(tokens),
        loss_mask=jnp.asarray((rng.random((rows, WIDTH)) < 0.7) & (real | spoil)),
        lengths=jnp.asarray(LENGTHS, jnp.int32),
        hidden=jnp.asarray(hidden),
        taps=jnp.zeros((0, rows, WIDTH, cases.HIDDEN)),
        key=jax.random.key(0),
    )


def reference(head: Any, params: Any, lent: Any, data: TrainBatch) -> tuple[float, list[float]]:
    """Return (loss, loss of each step) from the formulas of DRAFTS.md, section 10."""
    steps, window = head.config.steps, WIDTH - head.config.steps - 1
    tokens, states = np.asarray(data.tokens), [cases.wide(h)[:window] for h in data.hidden]
    mask = np.asarray(data.loss_mask) & (np.arange(WIDTH) < np.asarray(LENGTHS)[:, None])
    found = []
    for k in range(steps):
        total, count = 0.0, 0
        for row in range(len(tokens)):
            module = params.modules[min(k, head.modules - 1)]
            fed = tokens[row, 1 + k : 1 + k + window]
            _, states[row], logits = cases.numpy_module(head, module, lent, states[row], fed)
            log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            for t in range(window):
                if mask[row, t + 2 + k]:
                    total, count = total - log_q[t, tokens[row, t + 2 + k]], count + 1
        found.append(total / max(count, 1))
    shares = head.config.beta ** np.arange(steps)
    return float(np.dot(shares / shares.sum(), found)), found


@pytest.mark.parametrize("modules", [1, 2])
def test_loss_equals_a_float64_run(modules: int) -> None:
    head, params, lent = cases.tiny("llama", modules=modules)
    loss, metrics = cases.jit(head.loss)(params, lent, batch())
    expected, steps = reference(head, params, lent, batch())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose([metrics[f"loss_{k}"] for k in range(3)], steps, rtol=1e-5)
    spoiled, _ = cases.jit(head.loss)(params, lent, batch(spoil=True))
    np.testing.assert_allclose(spoiled, loss, rtol=1e-5)
    assert 0 <= metrics["accuracy"] <= 1 <= metrics["tau_greedy"] <= 4


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_go_through_the_carried_states(remat: bool) -> None:
    head, params, lent = cases.tiny("llama", remat=remat, beta=2.0)
    gradient, _ = cases.jit(jax.grad(head.loss, has_aux=True))(params, lent, batch())
    rng, data, size = np.random.default_rng(2), batch(), 1e-5
    way = jax.tree.map(lambda x: rng.normal(size=x.shape), params)

    def moved(by: float) -> float:
        there = jax.tree.map(lambda x, d: cases.wide(x) + by * d, params, way)
        return reference(head, there, lent, data)[0]

    expected = (moved(size) - moved(-size)) / (2 * size)
    slopes = jax.tree.map(lambda g, d: float(np.sum(cases.wide(g) * d)), gradient, way)
    np.testing.assert_allclose(sum(jax.tree.leaves(slopes)), expected, rtol=1e-3)


def test_other_terms_compare_with_the_target() -> None:
    goal = Objective(terms=("hard_ce", "kl_div"), factors=(0.5, 2.0))
    head, params, lent = cases.tiny("llama", objective=goal, steps=1)
    loss, metrics = cases.jit(head.loss)(params, lent, batch())
    plain, _ = reference(head, params, lent, batch())
    tokens, window = np.asarray(batch().tokens), WIDTH - 2
    mask = np.asarray(batch().loss_mask)[:, 2:]
    total = 0.0
    for row in range(len(tokens)):
        states = cases.wide(batch().hidden[row])
        _, _, logits = cases.numpy_module(
            head, params.modules[0], lent, states[:window], tokens[row, 1 : 1 + window]
        )
        # The state at t + 1 is the one that predicts x_{t+2}.
        target = states[1 : 1 + window] @ cases.wide(lent.output).T
        log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (target, logits))
        total += ((np.exp(log_p) * (log_p - log_q)).sum(-1) * mask[row]).sum()
    np.testing.assert_allclose(loss, 0.5 * plain + 2 * total / mask.sum(), rtol=1e-5)
    assert 0 < metrics["acceptance"] < 1


def test_nothing_supervised_is_no_loss() -> None:
    head, params, lent = cases.tiny("qwen3_5")
    silent = dataclasses.replace(batch(), loss_mask=jnp.zeros((3, WIDTH), bool))
    value, gradient = cases.jit(jax.value_and_grad(head.loss, has_aux=True))(params, lent, silent)
    assert value[0] == 0
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient))


def test_texts_too_short_for_the_steps_are_refused() -> None:
    head, params, lent = cases.tiny("llama", steps=13)
    with pytest.raises(ConfigError, match="needs texts of at least 15 tokens, these have 14"):
        head.loss(params, lent, batch())
