"""F19: texts that share a row train a head as they would alone, or are refused by it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.chat import Encoded
from specjax.data.dataset import Batches, Position
from specjax.data.packing import PackedBatches
from specjax.heads.base import Borrowed, borrow
from specjax.heads.dflash.anchors import lay_out, texts_of
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.dflash.loss import block_loss
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead
from specjax.heads.objective_config import Objective
from specjax.targets.base import Target
from specjax.training.step import features

# Tests run each program once or twice: compile it quickly rather than well.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})

LENGTH = 26
ROOM = 6  # pads behind every row: MTP leaves out the last places of a row, whatever stands there
SIZES = (20, 6, 6, 9, 1, 5, 2)
DSPARK = DFlashConfig(
    taps=(1, 3),
    block_size=4,
    sample_from_anchor=True,
    mask_token_id=90,
    layers=2,
    mlp=16,
    markov_rank=4,
    confidence=True,
    confidence_with_markov=True,
    num_anchors=64,  # all there are: which ones are drawn depends on the rows
    objective=Objective(
        ("hard_ce", "l1"), (0.1, 0.9), weighting="dflash_from_anchor", normaliser="weights"
    ),
)
DFLASH = DFlashConfig(
    taps=(1, 3),
    block_size=4,
    mask_token_id=90,
    layers=2,
    layer_types=("sliding", "full"),
    sliding_window=3,
    mlp=16,
    num_anchors=64,
)
EAGLE3 = Eagle3Config(taps=(1, 2, 3), mlp=16, ttt_length=3, mask_shift=2)
PACKED = ("eagle3", "dflash", "dspark", "mtp", "gemma4_mtp")


def make_head(kind: str, target: Target, borrowed: Borrowed) -> tuple[Any, Any]:
    """Return (head, weights away from their start, so that everything does something)."""
    info, key = target.info, jax.random.key(4)
    if kind == "eagle3":
        assert info.draft_block is not None
        head: Any = Eagle3Head.for_target(info, info.draft_block, EAGLE3)
        params = head.init(key, borrowed)
    elif kind in ("dflash", "dspark"):
        head = DFlashHead.for_target(info, DSPARK if kind == "dspark" else DFLASH)
        params = head.init(key, borrowed)
    elif kind == "mtp":
        head = MtpHead.for_target(info, MtpConfig())
        params = head.init(key, borrowed)
    else:
        head = Gemma4MtpHead.for_target(info, Gemma4MtpConfig(layers=2, hidden=16, steps=3))
        params = head.init(key, borrowed)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    moved = [
        leaf + 0.1 * jax.random.normal(k, leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for leaf, k in zip(leaves, keys, strict=True)
    ]
    return head, jax.tree.unflatten(tree, moved)


def make_rows() -> list[Encoded]:
    """Texts whose second half is the answer; the first has an answer from its first token on."""
    rng = np.random.default_rng(1)
    rows = []
    for i, n in enumerate(SIZES):
        mask = np.arange(n) >= (0 if i in (1, 2) else n // 2)
        rows.append(Encoded(rng.integers(3, 90, n).astype(np.int32), mask))
    return rows


def widen(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put `ROOM` more pads behind every row."""
    fill = {"documents": -1}
    return {
        name: x
        if x.ndim == 1
        else np.pad(x, ((0, 0), (0, ROOM)), constant_values=fill.get(name, 0))
        for name, x in batch.items()
    }


@pytest.mark.parametrize("kind", PACKED)
def test_packed_equals_apart(kind: str, target: tuple[Target, Any]) -> None:
    """Loss, gradients and metrics of packed rows are those of the same texts in rows of their own.

    Only heads whose sums are divided by what counts in the whole batch can agree.
    """
    model, weights = target
    borrowed = borrow(model, weights)
    head, params = make_head(kind, model, borrowed)
    rows = make_rows()
    packed = PackedBatches(rows, 2, LENGTH)
    assert packed.steps_per_epoch == 1 and max(map(len, packed.members(Position()))) > 2
    apart = Batches(rows, len(rows), (LENGTH,))

    def run(params: Any, batch: Any) -> Any:
        found = features(model, weights, head, batch, jax.random.key(0))
        return head.loss(params, borrowed, found)

    run_grad = jit(jax.value_and_grad(run, has_aux=True, allow_int=True))

    def slope(batch: dict[str, np.ndarray]) -> Any:
        return jax.device_get(run_grad(params, widen(batch)))

    (loss, metrics), gradient = slope(packed.batch(Position()))
    (want, want_metrics), want_gradient = slope(apart.batch(Position()))
    assert want > 0.1 and want_metrics["counted"] > 8
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(want_gradient), strict=True
    )
    moved = 0
    for (path, got), leaf in pairs:
        if np.issubdtype(leaf.dtype, np.floating):
            name = jax.tree_util.keystr(path)
            np.testing.assert_allclose(got, leaf, atol=1e-5, rtol=1e-3, err_msg=name)
            moved += bool(np.abs(leaf).max() > 1e-6)
    assert moved > 5


def test_f19_dspark_block_at_the_end_of_a_text(target: tuple[Target, Any]) -> None:
    """F19's own input: texts [1..6] and [7..12], anchor at position 4, block of 4.

    The one label left is 6; nothing of the second text is learnt, seen or counted; an anchor in
    the second text stands at its own positions.
    """
    model, weights = target
    borrowed = borrow(model, weights)
    head, params = make_head("dspark", model, borrowed)
    texts = [Encoded(np.arange(s, s + 6, dtype=np.int32), np.ones(6, bool)) for s in (1, 7)]
    packed = PackedBatches(texts, 1, 12, shuffle=False).batch(Position())
    apart = Batches(texts, 2, (12,), shuffle=False).batch(Position())

    @jit
    def run(batch: dict[str, np.ndarray], anchors: jax.Array) -> Any:
        found = texts_of(features(model, weights, head, batch, jax.random.key(0)))
        blocks = lay_out(head, found, anchors, jnp.ones(anchors.shape, bool))
        return blocks, block_loss(head, params, borrowed, found, blocks)[0].total

    blocks, loss = run(packed, jnp.asarray([[4, 8]]))
    assert np.asarray(blocks.supervised[0]).tolist() == [
        [True, False, False, False],
        [True, True, True, False],
    ]
    assert blocks.labels[0, 0, 0] == 6 and blocks.labels[0, 1, :3].tolist() == [10, 11, 12]
    assert blocks.positions[0].tolist() == [[4, 5, 6, 7], [2, 3, 4, 5]]
    np.testing.assert_allclose(loss, run(apart, jnp.asarray([[4], [2]]))[1], rtol=1e-5)
