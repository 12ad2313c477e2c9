"""Sweeps: which cells there are, what each is known by, and which share a baseline.

A cell's key is a digest of all that its figures depend on: the settings, and the contents (not the
names) of target, head and prompts. A cell whose record is there already is not run again; two cells
of one key are one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from specjax.data.prompts import load_prompts
from specjax.evaluation import fingerprints
from specjax.evaluation.config import EvalConfig

# What only drafting depends on; baselines that differ in nothing else are one.
_DRAFTING = ("num_speculative_tokens", "dtype", "time_shares", "calibration", "ngram")
DRAFTING_ENGINE = (
    "draft_sampling",
    "verification",
    "confidence_threshold",
    "argmax_confidence",
    "verify_widths",
    "cost_table",
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One evaluation of a sweep.

    Attributes:
        config: its settings; one head, one prompt set.
        fingerprints: digests of "target", "head" and "prompts".
        key: what it is known by.
        baseline: the key of the baseline that it is compared with; its own where it is one.
    """

    config: EvalConfig
    fingerprints: Mapping[str, str]
    key: str
    baseline: str

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is drafted."""
        return self.key == self.baseline


def plan(configs: Iterable[EvalConfig]) -> list[Cell]:
    """Return the cells of evaluations with one head and one prompt set each, without repetition.

    Raises:
        SpecJaxError: a target, head or prompt set that is not there.
    """
    prints = _Prints()
    cells: dict[str, Cell] = {}
    for config in configs:
        cell = _cell(config, prints.of(config))
        cells.setdefault(cell.key, cell)
    return list(cells.values())


def windows(cells: Sequence[Cell], together: int) -> Iterator[list[Cell]]:
    """Yield the cells, those of one target next to each other, in groups that share a baseline.

    Args:
        cells: in the order they were asked for; it is kept as far as that goes.
        together: most cells of a group.
    """
    by_target: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        by_target.setdefault(held(cell), {}).setdefault(cell.baseline, []).append(cell)
    for groups in by_target.values():
        for group in groups.values():
            for first in range(0, len(group), together):
                yield group[first : first + together]


def held(cell: Cell) -> str:
    """Return a digest of what a loaded target depends on: cells of one digest share it."""
    config = cell.config
    how = dataclasses.asdict(config.target_options)
    # The embedded default comes with its head, which is in the dtype of the run.
    own = None if config.target else config.dtype
    mesh = dataclasses.asdict(config.engine.mesh)
    return fingerprints.of_json(
        [cell.fingerprints["target"], how, config.baseline_dtypes, own, mesh]
    )


def _cell(config: EvalConfig, prints: Mapping[str, str]) -> Cell:
    template = config.chat_template
    matters = dataclasses.asdict(config)
    for name in ("target", "head", "prompts", "num_prompts", "trace", "out"):
        del matters[name]
    matters["chat_template"] = (
        fingerprints.of_file(template) if isinstance(template, str) else template
    )
    engine = matters["engine"]
    engine["cost_table"] = fingerprints.of_file(engine["cost_table"])
    if prints["head"] != "ngram":
        del matters["ngram"]
    key = fingerprints.of_json([matters, prints])
    for name in _DRAFTING:
        matters.pop(name, None)
    for name in DRAFTING_ENGINE:
        del engine[name]
    baseline = fingerprints.of_json([matters, {**prints, "head": "none"}])
    return Cell(config, prints, baseline if prints["head"] == "none" else key, baseline)


class _Prints:
    """Digests, each computed once though a sweep names its files in every cell."""

    def __init__(self) -> None:
        self._target = functools.cache(fingerprints.of_checkpoint)
        self._head = functools.cache(fingerprints.of_head)
        self._prompts = functools.cache(
            lambda source, count: fingerprints.of_prompts(load_prompts(source, limit=count or None))
        )

    def of(self, config: EvalConfig) -> dict[str, str]:
        if not config.target:
            asked = f"embedded {config.num_prompts}"
            return {"target": "embedded", "head": "embedded", "prompts": asked}
        # The cheapest first: a misspelt prompt file should not cost a read of the weights.
        prompts = self._prompts(config.prompts, config.num_prompts)
        head = self._head(config.head)
        return {"target": self._target(config.target), "head": head, "prompts": prompts}
