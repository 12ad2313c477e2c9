"""The expected length of rounds, against chains counted by hand from the head's own drafts."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import ConfigError
from specjax.data.dataset import Batches, Position
from specjax.heads.base import NullHead, borrow
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.targets.base import Target
from specjax.training.simulate import simulate
from tests.training import toy

Loaded = tuple[Target, Any]


class Told:
    """A head whose chains are as long as its batches say: tokens that count reach their id."""

    name: ClassVar[str] = "told"
    taps: ClassVar[tuple[int, ...]] = ()
    reads: ClassVar[tuple[int, ...]] = ()

    def loss(self, params: Any, borrowed: Any, batch: Any) -> Any:
        del params, borrowed
        share = jnp.mean(jnp.where(batch.loss_mask, batch.tokens, 0), where=batch.loss_mask)
        return share, {"reach_greedy": jnp.stack([share / 100, share / 200])}


def test_means_weigh_batches_by_what_is_supervised(target: Loaded) -> None:
    rows = toy.make_rows(7)
    batches = Batches(rows, 4, (16,), shuffle=False)
    found = simulate(*target, Told(), (), (b for b, _ in batches.iterate(epochs=1)))
    said = np.concatenate([row.ids[row.mask] for row in rows])
    np.testing.assert_allclose(found.greedy, 1 + np.cumsum([said.mean() / 100, said.mean() / 200]))
    assert found.sampled is None and found.places == len(said)


def test_every_width_at_once(target: Loaded) -> None:
    """The first width of a pass of three steps is what a pass of one step finds."""
    model, weights = target
    block = model.info.draft_block
    assert block is not None
    batch = toy.make_batches(toy.make_rows(4)).batch
    head = Eagle3Head.for_target(
        model.info, block, Eagle3Config(taps=(1, 2, 3), mlp=16, ttt_length=3)
    )
    params = head.init(jax.random.key(0), borrow(model, weights))
    found = simulate(model, weights, head, params, [batch(Position())])
    short = Eagle3Head.for_target(
        model.info, block, Eagle3Config(taps=(1, 2, 3), mlp=16, ttt_length=1)
    )
    one = simulate(model, weights, short, params, [batch(Position())])
    np.testing.assert_allclose(found.greedy[:1], one.greedy, rtol=1e-6)
    np.testing.assert_allclose(found.sampled[:1], one.sampled, rtol=1e-5)
    assert (np.diff(found.sampled) > 0).all() and found.sampled[-1] < 4


def test_a_head_without_a_loss(target: Loaded) -> None:
    with pytest.raises(ConfigError, match="kind 'none' is not trained"):
        simulate(*target, NullHead(), (), [])
