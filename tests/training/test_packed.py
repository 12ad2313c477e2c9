"""Packed rows reach a head's loss with their documents, or are refused; never ignored."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from specjax.core.errors import ConfigError
from specjax.data.dataset import Position
from specjax.data.packing import PackedBatches
from specjax.heads.base import borrow
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
from specjax.heads.mtp.head import MtpHead
from specjax.heads.objective_config import Objective
from specjax.training.step import features
from tests.training.toy import make_rows, make_target

ROWS = make_rows(6, longest=12)


def alone() -> dict[str, np.ndarray]:
    """Every row by itself, in one batch."""
    ids, mask = np.zeros((len(ROWS), 12), np.int32), np.zeros((len(ROWS), 12), bool)
    for b, row in enumerate(ROWS):
        ids[b, : len(row.ids)], mask[b, : len(row.ids)] = row.ids, row.mask
    lengths = np.array([len(row.ids) for row in ROWS], np.int32)
    return {"input_ids": ids, "loss_mask": mask, "lengths": lengths}


def packed() -> dict[str, np.ndarray]:
    """All rows in one batch of packed rows."""
    batches = PackedBatches(ROWS, 4, 24, shuffle=False)
    assert batches.steps_per_epoch == 1
    batch = batches.batch(Position())
    assert batch["documents"].max() >= 1
    return batch


def loss_and_gradients(head: Any, batch: dict[str, np.ndarray]) -> tuple[Any, Any]:
    target, weights = make_target()
    params = head.init(jax.random.key(0), borrow(target, weights))

    @jax.jit
    def run(params: Any) -> Any:
        def loss(params: Any) -> Any:
            found = features(target, weights, head, batch, jax.random.key(1))
            return head.loss(params, borrow(target, weights), found)

        return jax.value_and_grad(loss, has_aux=True, allow_int=True)(params)

    (loss, metrics), gradients = run(params)
    return (loss, metrics["counted"]), gradients


@pytest.mark.parametrize("from_anchor", [False, True])
def test_f19_packed_blocks_train_as_documents_alone(from_anchor: bool) -> None:
    """F19: with every possible anchor, loss and gradients are those of the documents alone."""
    target, _ = make_target()
    config = DFlashConfig(
        block_size=4,
        layers=1,
        mask_token_id=91,
        num_anchors=24,
        sample_from_anchor=from_anchor,
        markov_rank=4 if from_anchor else 0,
        objective=Objective(terms=("hard_ce", "l1"), normaliser="weights"),
    )
    head = DFlashHead.for_target(target.info, config)
    one, of_one = loss_and_gradients(head, alone())
    many, of_many = loss_and_gradients(head, packed())
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert one[1] > 10
    for a, b in zip(jax.tree.leaves(of_one), jax.tree.leaves(of_many), strict=True):
        if a.dtype == np.float32:
            np.testing.assert_allclose(b, a, atol=1e-5)


@pytest.mark.parametrize("name", ["eagle3", "mtp", "gemma4_mtp"])
def test_losses_over_whole_rows_refuse_packed_ones(name: str) -> None:
    """One line names the setting, instead of labels across the ends of documents."""
    target, _ = make_target()
    head: Any = {
        "eagle3": lambda: Eagle3Head.for_target(target.info, target.info.draft_block),
        "mtp": lambda: MtpHead.for_target(target.info),
        "gemma4_mtp": lambda: Gemma4MtpHead.for_target(target.info),
    }[name]()
    with pytest.raises(ConfigError, match=r"Data\.pack=False"):
        loss_and_gradients(head, packed())
