"""The training and held-out batches of a run, from its chat files and the target's tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.core.errors import DataError
from specjax.data.chat import ChatEncoder
from specjax.data.conversations import RowCounts, load_chats
from specjax.data.dataset import Batches
from specjax.data.packing import PackedBatches
from specjax.data.templates import read_template
from specjax.io.hf import resolve
from specjax.training.config import DataConfig, TrainerConfig


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """What a run trains on and is measured on.

    Attributes:
        train: batches in training order.
        heldout: batches of the rows kept out, None if there are none.
        report: one line on what became of the files' rows.
    """

    train: Batches
    heldout: Batches | None
    report: str


def load(config: TrainerConfig, stop_ids: tuple[int, ...]) -> TrainingData:
    """Read, tokenise, mask, filter and batch the data of a run.

    Args:
        config: the run.
        stop_ids: the target's, which end an assistant's turn.

    Raises:
        DataError: nothing to train on, or the tokenizer cannot render chats.
    """
    from transformers import AutoTokenizer

    data = config.data
    tokenizer = AutoTokenizer.from_pretrained(resolve(config.target))
    encoder = encoder_for(data, tokenizer, stop_ids)
    rows, counts = load_chats(data.paths, encoder, data.max_length, data.strict)
    # Token 0 is never predicted, whatever its mask.
    usable = [row for row in rows if row.mask[1:].sum() >= data.min_supervised]
    few = len(rows) - len(usable)
    if len(usable) <= data.holdout:
        raise DataError(
            f"{len(usable)} usable rows leave nothing to train on beside Data.holdout="
            f"{data.holdout}"
        )
    at = len(usable) - data.holdout
    pad = tokenizer.pad_token_id or 0

    def batches(part: list, shuffle: bool) -> Batches:
        if data.pack:
            (length,) = data.buckets()
            return PackedBatches(part, config.batch_size, length, config.seed, shuffle, pad)
        return Batches(part, config.batch_size, data.buckets(), config.seed, shuffle, pad)

    train = batches(usable[:at], data.shuffle)
    return TrainingData(
        train=train,
        heldout=batches(usable[at:], False) if data.holdout else None,
        report=_report(counts, few, at, train.padding),
    )


def encoder_for(data: DataConfig, tokenizer: Any, stop_ids: tuple[int, ...]) -> ChatEncoder:
    """Return what renders and masks conversations as the settings say.

    Raises:
        DataError: no chat template, or one that cannot be used.
    """
    template = data.chat_template and read_template(data.chat_template, tokenizer)
    options = {} if data.enable_thinking is None else {"enable_thinking": data.enable_thinking}
    return ChatEncoder(
        tokenizer,
        stop_ids,
        chat_template=template or None,
        supervise_thinking=data.supervise_thinking,
        **options,
    )


def _report(counts: RowCounts, few: int, trained: int, padding: float) -> str:
    left_out = counts.left_out() | ({"with too few supervised tokens": few} if few else {})
    dropped = ", ".join(f"{number} {name}" for name, number in left_out.items())
    places = f"; malformed rows, the first: {'; '.join(counts.places)}" if counts.places else ""
    return (
        f"{trained} rows to train on, {counts.used - few - trained} held out; "
        f"{counts.supervised} of {counts.tokens} tokens supervised; {counts.cut} rows cut; "
        f"{padding:.1%} of positions are pads; "
        f"left out: {dropped or 'none'}{places}"
    )
