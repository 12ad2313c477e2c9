"""Draft vocabularies: the target tokens a head with a short output layer can propose."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from specjax.core.errors import DataError
from specjax.data.chat import Encoded


@dataclass(frozen=True)
class DraftVocab:
    """A choice of Vd of the target's V tokens, in released form.

    Attributes:
      d2t: int64 offsets; draft id d stands for target id d + d2t[d], ascending.
      t2d: true for the target ids that are kept.
      coverage: share of the counted tokens that are kept.
    """

    d2t: Int[np.ndarray, " Vd"]
    t2d: Bool[np.ndarray, " V"]
    coverage: float

    @property
    def kept(self) -> Int[np.ndarray, " Vd"]:
        """The target ids that are kept, ascending."""
        return np.flatnonzero(self.t2d)


def count_supervised(rows: Iterable[Encoded], vocab: int) -> Int[np.ndarray, " V"]:
    """How often the assistant says each of the target's ``vocab`` tokens.

    Raises:
      DataError: an id outside the vocabulary (the tokenizer is another target's).
    """
    counts = np.zeros(vocab, dtype=np.int64)
    for row in rows:
        ids = row.ids[row.mask]
        if len(ids) and ids.max() >= vocab:
            raise DataError(f"token id {ids.max()} lies outside the target's vocabulary of {vocab}")
        np.add.at(counts, ids, 1)
    return counts


def choose(
    counts: Int[np.ndarray, " V"],
    size: int,
    always: Sequence[int] = (),
    fill: Int[np.ndarray, " V"] | None = None,
) -> DraftVocab:
    """Keep the ``size`` most frequent tokens, ties to the lower id, filled up by unused low ids.

    Args:
      counts: occurrences of each target id.
      size: Vd.
      always: ids kept whatever their count, such as the stop tokens.
      fill: occurrences elsewhere (in prompts, say) that order the tokens of equal count.

    Raises:
      DataError: a size outside 1..V, below the number of ``always``, or one of these outside V.
    """
    vocab, always = len(counts), sorted(set(always))
    if not 1 <= size <= vocab:
        raise DataError(f"a draft vocabulary of {size} is not within the target's 1 to {vocab}")
    if always and not 0 <= always[0] <= always[-1] < vocab:
        raise DataError(f"ids to keep {always} lie outside the target's vocabulary of {vocab}")
    if len(always) > size:
        raise DataError(f"{len(always)} ids to keep do not fit a draft vocabulary of {size}")
    rank = counts.astype(np.int64)
    rank[always] = np.iinfo(np.int64).max
    second = np.zeros_like(rank) if fill is None else fill
    # lexsort's last key comes first; a stable order leaves what is equal in both to the lower id.
    kept = np.sort(np.lexsort((-second, -rank))[:size])
    t2d = np.zeros(vocab, dtype=bool)
    t2d[kept] = True
    total = int(counts.sum())
    return DraftVocab(
        d2t=kept - np.arange(size),
        t2d=t2d,
        coverage=int(counts[kept].sum()) / total if total else 0.0,
    )


def save(vocab: DraftVocab, path: str | Path) -> None:
    """Write ``d2t`` and ``t2d`` as safetensors; the file appears only when complete."""
    from safetensors.numpy import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({"d2t": vocab.d2t, "t2d": vocab.t2d}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
