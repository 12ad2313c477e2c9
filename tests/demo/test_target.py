"""The demonstration target as the trainer takes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.demo import target as demo
from scripts.demo.tokenizer import MASK, SPECIAL, VOCAB
from specjax import targets
from specjax.core.params import count, init_params
from specjax.heads.base import TrainBatch, borrow

SMALL = demo.CONFIG | {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "sliding_window": 3,
}
LENGTHS = (7, 4)


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    target = targets.from_config(SMALL)
    return target, init_params(target.specs(), jax.random.key(0), scale=0.3)


def batch(packed: bool) -> TrainBatch:
    """Two texts in two rows, or the same ones in one row."""
    rng = np.random.default_rng(0)
    said = [rng.integers(1, 23, n) for n in LENGTHS]
    masks = [np.arange(n) >= n // 2 for n in LENGTHS]
    if packed:
        tokens, mask = np.concatenate(said)[None], np.concatenate(masks)[None]
        positions = np.concatenate([np.arange(n) for n in LENGTHS])[None]
        documents, lengths = np.repeat([0, 1], LENGTHS)[None], np.array([sum(LENGTHS)])
    else:
        tokens, mask = np.zeros((2, max(LENGTHS)), int), np.zeros((2, max(LENGTHS)), bool)
        for row, (ids, own) in enumerate(zip(said, masks, strict=True)):
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids, own
        positions = documents = None
        lengths = np.array(LENGTHS)
    one = TrainBatch(
        tokens=jnp.asarray(tokens, jnp.int32),
        loss_mask=jnp.asarray(mask),
        lengths=jnp.asarray(lengths, jnp.int32),
        hidden=jnp.zeros((*tokens.shape, 16)),
        taps=jnp.zeros((0, *tokens.shape, 16)),
        key=jax.random.key(0),
    )
    if packed:
        one = dataclasses.replace(
            one, documents=jnp.asarray(documents), positions=jnp.asarray(positions)
        )
    return one


def test_loss_is_that_of_the_next_token(small: tuple[Any, Any]) -> None:
    target, params = small
    given = batch(packed=False)
    loss, metrics = demo.NextToken(target).loss(params, borrow(target, params), given)
    losses, answers, right = [], [], []
    for row, length in enumerate(LENGTHS):  # each text alone, in float64
        ids = np.asarray(given.tokens[row, :length])
        out = target.forward(params, jnp.asarray(ids[None]))
        logits = np.asarray(target.logits(params, out.hidden)[0], np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for place in range(1, length):
            losses.append(-log_p[place - 1, ids[place]])
            if given.loss_mask[row, place]:
                answers.append(losses[-1])
                right.append(logits[place - 1].argmax() == ids[place])
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(metrics["answer_loss"], np.mean(answers), rtol=1e-5)
    np.testing.assert_allclose(metrics["answer_accuracy"], np.mean(right), rtol=1e-6)


def test_packed_texts_learn_the_same(small: tuple[Any, Any]) -> None:
    target, params = small
    head = demo.NextToken(target)
    alone, _ = head.loss(params, borrow(target, params), batch(packed=False))
    packed, _ = head.loss(params, borrow(target, params), batch(packed=True))
    np.testing.assert_allclose(packed, alone, rtol=1e-5)


def test_the_target_is_small_and_deep() -> None:
    config = demo.CONFIG
    target = targets.from_config(config)
    assert target.info.num_layers == 12
    assert target.info.hidden <= 256
    assert 2 * count(target.specs()) < 9_000_000  # bytes in bfloat16
    assert set(target.info.layer_kinds) == {"window", "full"}  # so that heads read both
    assert config["vocab_size"] == VOCAB
    assert SPECIAL[config["mask_token_id"]] == MASK
