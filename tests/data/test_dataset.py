"""Rows are cut and counted (F26), batches have static shapes, the order resumes exactly."""

import json

import numpy as np
import pytest

from specjax.core.errors import DataError
from specjax.data.chat import ChatEncoder, Encoded
from specjax.data.conversations import load_chats
from specjax.data.dataset import Batches, Position
from tests.data.templates import CHATML


@pytest.fixture(scope="module")
def encoder(make_tokenizer):
    """Encoder with the chatml template."""
    return ChatEncoder(make_tokenizer(CHATML, "<|im_end|>"))


def chat(*turns):
    """A row of alternating user and assistant messages."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def write(path, *rows):
    """A JSON lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_f26_truncation(tmp_path, encoder):
    """F26: an answer that crosses the end keeps its part, one that starts after it is dropped."""
    crosses = chat("Two and two?", "four, of course. " * 20)
    after = chat("Two and two? " * 40, "four")
    fits = chat("And?", "five")
    path = write(tmp_path / "d.jsonl", crosses, after, fits, {"messages": []}, chat("only asked"))
    prompt = len(encoder.prompt_ids(crosses["messages"][:1]))
    rows, counts = load_chats([path], encoder, max_length=prompt + 7)
    assert (len(rows[0].ids), len(rows[0].mask)) == (prompt + 7, prompt + 7)
    assert np.flatnonzero(rows[0].mask).tolist() == list(range(prompt, prompt + 7))
    whole = encoder.encode(crosses["messages"])
    assert rows[0].ids.tolist() == whole.ids[: prompt + 7].tolist()
    assert (counts.used, counts.cut, counts.masked, counts.empty) == (2, 1, 2, 1)
    end = encoder.tokenizer.eos_token_id
    assert rows[1].ids[rows[1].mask][-1] == end  # what fits keeps its end token
    assert counts.supervised == sum(int(row.mask.sum()) for row in rows)


def test_nothing_to_train_on(tmp_path, encoder):
    """A file of unusable rows is refused; a malformed row is named."""
    with pytest.raises(DataError, match=r"no row of .*: 1 without an answer"):
        load_chats([write(tmp_path / "d.jsonl", chat("asked"))], encoder)
    with pytest.raises(DataError, match=r"no row of .*: 1 too short"):
        load_chats([write(tmp_path / "d.jsonl", chat("a", "b"))], encoder, max_length=1)
    with pytest.raises(DataError, match=r"d\.jsonl:2: no .responses"):
        path = write(tmp_path / "d.jsonl", chat("a", "b"), {"turns": ["a"]})
        load_chats([path], encoder, strict=True)


def rows_of(*lengths):
    """Rows whose ids tell which row they are."""
    return [
        Encoded(np.full(n, i + 1, np.int32), np.arange(n) >= n // 2) for i, n in enumerate(lengths)
    ]


def test_every_row_once_an_epoch_in_static_shapes():
    """Right padding, true lengths, masks beside their ids, few shapes."""
    rows = rows_of(3, 8, 5, 2, 7, 4, 8, 1, 6)
    batches = Batches(rows, batch_size=2, lengths=(4, 8), seed=3, pad_id=0)
    for epoch in range(3):
        seen = []
        for step in range(batches.steps_per_epoch):
            batch = batches.batch(Position(epoch, step))
            assert batch["input_ids"].shape == batch["loss_mask"].shape
            assert batch["input_ids"].shape in {(2, 4), (2, 8)}
            for b, n in enumerate(batch["lengths"]):
                ids, mask = batch["input_ids"][b], batch["loss_mask"][b]
                assert not ids[n:].any() and not mask[n:].any()
                if n:
                    row = rows[ids[0] - 1]
                    assert ids[:n].tolist() == row.ids.tolist()
                    assert mask[:n].tolist() == row.mask.tolist()
                    seen.append(int(ids[0]))
        assert sorted(seen) == list(range(1, len(rows) + 1))
    with pytest.raises(IndexError):
        batches.batch(Position(0, batches.steps_per_epoch))


def first_rows(batches, position, epochs):
    """(what each batch holds, position after it)."""
    return [
        (batch["input_ids"].tobytes(), after) for batch, after in batches.iterate(position, epochs)
    ]


def test_resume_is_exact_at_every_step():
    """Going on from a saved position gives what the unbroken run gives, over epoch ends."""
    rows = rows_of(*range(1, 12))
    whole = first_rows(Batches(rows, 2, (6, 12), seed=1), None, 2)
    assert len(whole) == 12
    for i, (_, after) in enumerate(whole):
        assert first_rows(Batches(rows, 2, (6, 12), seed=1), after, 2) == whole[i + 1 :]


def test_order_depends_on_seed_and_epoch_alone():
    """Another seed or epoch: another order. Without shuffling: the order of the file."""
    rows = rows_of(*[4] * 32)

    def order(seed, epoch, shuffle=True):
        batches = Batches(rows, 1, (4,), seed, shuffle)
        return [int(batches.batch(Position(epoch, s))["input_ids"][0, 0]) for s in range(32)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1) != order(2, 0) != order(1, 0)
    assert order(1, 5, shuffle=False) == list(range(1, 33))


@pytest.mark.parametrize("arguments", [([], 2, (4,)), (rows_of(5), 2, (4,)), (rows_of(3), 0, (4,))])
def test_sizes_that_do_not_fit(arguments):
    """No rows, a row too long, no batch."""
    with pytest.raises(DataError, match="do not fit"):
        Batches(*arguments)


def test_a_share_is_those_rows_of_the_whole_batch():
    rows = [Encoded(np.arange(1, n + 1), np.ones(n, bool)) for n in (3, 5, 2, 8, 7, 4)]
    batches = Batches(rows, 4, (8,), seed=1)
    for step in range(batches.steps_per_epoch):
        position = Position(0, step)
        whole = batches.batch(position)
        parts = [batches.batch(position, share) for share in ({0, 1}, {2, 3})]
        for name, values in whole.items():
            assert (parts[0][name][:2] == values[:2]).all()
            assert (parts[1][name][2:] == values[2:]).all()
        assert not parts[0]["lengths"][2:].any() and not parts[1]["loss_mask"][:2].any()
        assert batches.tokens(position) == whole["lengths"].sum()
    found = list(batches.iterate(epochs=1, share={1}))
    assert len(found) == batches.steps_per_epoch
    assert all(not batch["lengths"][[0, 2, 3]].any() for batch, _ in found)
