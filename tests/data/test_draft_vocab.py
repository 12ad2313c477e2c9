"""Draft vocabularies: most frequent first, ties and filling by low id (F30), released form."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.core.errors import DataError
from specjax.data.chat import Encoded
from specjax.data.draft_vocab import choose, count_supervised, save


def test_counts_supervised_tokens_only():
    """Prompt tokens do not count."""
    row = Encoded(np.array([5, 5, 2, 3, 2]), np.array([False, False, True, True, True]))
    assert count_supervised([row, row], 6).tolist() == [0, 0, 4, 2, 0, 0]
    with pytest.raises(DataError, match="token id 3 lies outside"):
        count_supervised([row], 3)


def test_most_frequent_ties_to_the_lower_id():
    """Ascending target ids; d2t are offsets and t2d marks the same ids."""
    vocab = choose(np.array([1, 7, 2, 9, 2, 2]), 4)
    assert vocab.kept.tolist() == [1, 2, 3, 4]
    assert (np.arange(4) + vocab.d2t).tolist() == [1, 2, 3, 4]
    assert vocab.d2t.dtype == np.int64 and vocab.t2d.dtype == bool
    assert vocab.coverage == pytest.approx(20 / 23)


def test_f30_filled_up_with_unused_low_ids():
    """F30: 20 distinct ids and a draft vocabulary of 64."""
    counts = np.zeros(97, np.int64)
    counts[70:90] = 1
    vocab = choose(counts, 64)
    assert vocab.kept.tolist() == [*range(44), *range(70, 90)]
    assert vocab.coverage == 1.0


def test_stop_tokens_are_kept_whatever_their_count():
    """A head that cannot propose the stop token never drafts an ending."""
    vocab = choose(np.array([9, 8, 7, 0, 6]), 2, always=(3,))
    assert vocab.kept.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (7, (), "7 is not within the target's 1 to 6"),
        (0, (), "0 is not within"),
        (2, (1, 2, 3), "3 ids to keep do not fit"),
        (2, (6,), "lie outside"),
        (2, (-1,), "lie outside"),
    ],
)
def test_refusals(size, always, message):
    """Sizes and ids that do not fit the target."""
    with pytest.raises(DataError, match=message):
        choose(np.ones(6, np.int64), size, always)


def test_full_size_is_the_identity():
    """Vd = V keeps every id in its place."""
    vocab = choose(np.arange(6), 6)
    assert not vocab.d2t.any() and vocab.t2d.all()


def test_saved_form(tmp_path):
    """d2t and t2d, nothing else, nothing left behind."""
    vocab = choose(np.arange(6), 3)
    save(vocab, tmp_path / "new" / "v.safetensors")
    read = load_file(tmp_path / "new" / "v.safetensors")
    assert sorted(read) == ["d2t", "t2d"]
    assert read["d2t"].tolist() == vocab.d2t.tolist() == [3, 3, 3]
    assert read["t2d"].tolist() == vocab.t2d.tolist()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["v.safetensors"]


def test_tokens_of_equal_count_follow_the_second_counts() -> None:
    counts, second = np.array([0, 5, 0, 0, 5, 0]), np.array([0, 0, 1, 9, 3, 0])
    assert choose(counts, 3, fill=second).kept.tolist() == [1, 3, 4]
    assert choose(counts, 5, fill=second).kept.tolist() == [0, 1, 2, 3, 4]
    assert choose(counts, 1, fill=second).kept.tolist() == [4]
