import json
from pathlib import Path

import numpy as np
import pytest

from specjax.core.errors import DataError
from specjax.data.dataset import Position
from specjax.training import rows
from specjax.training.config import DataConfig, TrainerConfig
from tests.training.files import write_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_target(folder / "target")
    chats = [
        [("user", "two and two?"), ("assistant", "the answer is four")],
        [("user", "and?"), ("assistant", "x")],
        [("user", "never answered")],
        [("user", "and three?"), ("assistant", "it is five, of course")],
    ]
    lines = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in chats]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def config(folder: Path, **data: object) -> TrainerConfig:
    given = DataConfig(files=str(folder / "chats.jsonl"), max_length=96, **data)  # type: ignore[arg-type]
    return TrainerConfig(target=str(folder / "target"), out="out", data=given, batch_size=2)


def test_counts_and_holds_out(folder: Path) -> None:
    data = rows.load(config(folder, min_supervised=3, holdout=1), (2,))
    assert len(data.train.rows) == 1 and data.heldout is not None
    assert len(data.heldout.rows) == 1 and not data.heldout.shuffle
    assert data.report.startswith("1 rows to train on, 1 held out;")
    assert "1 without an answer in reach, 1 with too few supervised tokens" in data.report
    first = data.train.rows[0]
    assert first.mask[-1] or first.mask[-2]  # the end of the turn is learnt
    assert not first.mask[:5].any()


def test_refuses_when_nothing_is_left(folder: Path) -> None:
    with pytest.raises(DataError, match="3 usable rows leave nothing to train on"):
        rows.load(config(folder, holdout=3), (2,))


def test_packs_where_asked(folder: Path) -> None:
    """Both parts are packed, and the report says how many positions are pads."""
    apart = rows.load(config(folder, min_supervised=1, lengths=(128,)), (2,))
    packed = rows.load(config(folder, min_supervised=1, lengths=(128,), pack=True), (2,))
    batch = packed.train.batch(Position())
    used = [len(row.ids) for row in packed.train.rows]
    assert len(used) == 3 and packed.train.shape(Position()) == (2, 128)
    assert sorted(np.unique(batch["documents"])) == [-1, 0, 1, 2]  # all in one row
    for data, room in ((apart, 4 * 128), (packed, 2 * 128)):  # batches of two rows
        assert f" {1 - sum(used) / room:.1%} of positions are pads;" in data.report
