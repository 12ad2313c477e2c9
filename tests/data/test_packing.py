"""Packed rows hold every document once, apart, in an order that (seed, epoch) decides."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.core.errors import DataError
from specjax.data.chat import Encoded
from specjax.data.dataset import Batches, Position
from specjax.data.packing import PackedBatches, fit


def rows_of(*lengths):
    """Rows whose ids tell which row they are."""
    return [
        Encoded(np.full(n, i + 1, np.int32), np.arange(n) >= n // 2) for i, n in enumerate(lengths)
    ]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 64))
def test_fit_overfills_no_bin_and_wastes_little(lengths, room):
    """Two bins could always not be one: each pair holds more than a bin."""
    lengths = sorted(lengths, reverse=True)
    bins = fit(lengths, room)
    assert sorted(set(bins)) == list(range(max(bins) + 1))
    filled = np.bincount(bins, weights=lengths)
    assert filled.max() <= room
    fullest = np.sort(filled)
    assert len(filled) == 1 or fullest[0] + fullest[1] > room


def test_fit_prefers_the_fullest():
    """8 and 5 + 3 fill two bins of 8, where first-come packing would need three."""
    assert fit([8, 5, 3], 8) == [0, 1, 1]
    assert fit([6, 5, 3, 2], 8) == [0, 1, 1, 0]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_every_document_once_an_epoch(lengths, batch_size, seed):
    """Contents, document numbers, positions from 0 and pads, over three epochs."""
    rows = rows_of(*lengths)
    batches = PackedBatches(rows, batch_size, 16, seed)
    for epoch in range(3):
        seen = []
        for step in range(batches.steps_per_epoch):
            batch = batches.batch(Position(epoch, step))
            assert {name: array.shape for name, array in batch.items()} == {
                "input_ids": (batch_size, 16),
                "loss_mask": (batch_size, 16),
                "documents": (batch_size, 16),
                "positions": (batch_size, 16),
                "lengths": (batch_size,),
            }
            members = batches.members(Position(epoch, step))
            members += [[]] * (batch_size - len(members))
            for b, holds in enumerate(members):
                at = 0
                for d, member in enumerate(holds):
                    n = len(rows[member].ids)
                    part = slice(at, at + n)
                    assert batch["input_ids"][b, part].tolist() == rows[member].ids.tolist()
                    assert batch["loss_mask"][b, part].tolist() == rows[member].mask.tolist()
                    assert batch["documents"][b, part].tolist() == [d] * n
                    assert batch["positions"][b, part].tolist() == list(range(n))
                    at += n
                assert batch["lengths"][b] == at
                assert not batch["input_ids"][b, at:].any()
                assert not batch["loss_mask"][b, at:].any()
                assert set(batch["documents"][b, at:]) <= {-1}
                seen += holds
        assert sorted(seen) == list(range(len(rows)))
        with pytest.raises(IndexError):
            batches.batch(Position(epoch, batches.steps_per_epoch))


def contents(batches, position=None, epochs=2):
    """(what each batch holds, position after it)."""
    return [
        (batch["input_ids"].tobytes() + batch["documents"].tobytes(), after)
        for batch, after in batches.iterate(position, epochs)
    ]


def test_resume_is_exact_at_every_step():
    """Going on from a saved position gives what the unbroken run gives, over epoch ends."""
    rows = rows_of(*range(1, 12), *range(1, 12))

    def made():
        return PackedBatches(rows, 2, 12, seed=1)

    whole = contents(made())
    for i, (_, after) in enumerate(whole):
        assert contents(made(), after) == whole[i + 1 :]


def test_order_depends_on_seed_and_epoch_alone():
    """Which rows share a row changes by epoch and seed; without shuffling nothing does."""
    rows = rows_of(*[4] * 16, *[3] * 16)

    def order(seed, epoch, shuffle=True):
        batches = PackedBatches(rows, 1, 8, seed, shuffle)
        return [batches.members(Position(epoch, s)) for s in range(batches.steps_per_epoch)]

    def pairs(members):
        return {frozenset(row) for batch in members for row in batch}

    assert order(1, 0) == order(1, 0)
    assert pairs(order(1, 0)) != pairs(order(1, 1)) != pairs(order(2, 0)) != pairs(order(1, 0))
    assert order(1, 0, False) == order(2, 5, False)
    assert order(1, 0, False)[:2] == [[[0, 1]], [[2, 3]]]


def test_padding_is_counted():
    """The share of pads over an epoch, last batch included; packing has fewer than buckets."""
    rows = rows_of(8, 5, 3, 8)
    assert PackedBatches(rows, 1, 8).padding == 0
    assert PackedBatches(rows, 2, 8).padding == 1 - 24 / 32
    assert Batches(rows, 1, (4, 8)).padding == 1 - 24 / 28


def test_sizes_that_do_not_fit():
    """A document longer than a row."""
    with pytest.raises(DataError, match="do not fit"):
        PackedBatches(rows_of(5, 9), 2, 8)


def test_a_share_is_those_rows_of_the_whole_batch():
    batches = PackedBatches(rows_of(5, 4, 3, 8, 7, 2, 6, 5), 2, 8, seed=1)
    position = Position(0, 1)
    whole, part = batches.batch(position), batches.batch(position, {1})
    for name, values in whole.items():
        np.testing.assert_array_equal(part[name][1], values[1])
    assert part["lengths"][0] == 0 and (part["documents"][0] == -1).all()
    assert batches.tokens(position) == whole["lengths"].sum()
