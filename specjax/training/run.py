"""A whole training run: data in, trained head out, in a folder that says how it came about."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax import heads
from specjax.core import hosts
from specjax.core.errors import DataError
from specjax.io.hf import TensorReader
from specjax.targets.base import Target
from specjax.training import rows
from specjax.training.config import TrainerConfig
from specjax.training.features.batches import from_cache
from specjax.training.logging import Display
from specjax.training.trainer import Outcome, Trainer

PyTree = Any


def train(
    config: TrainerConfig,
    target: Target,
    target_params: PyTree,
    head: Any,
    head_params: PyTree,
    operative: str = "",
) -> Path:
    """Train a head and write it in its released layout.

    Args:
        config: the run; `config.out` gets `config.gin`, `train.jsonl`, `checkpoints/`, `head/`.
        target: the frozen target.
        target_params: its weights, in `config.target_dtype`, where `config.mesh` puts them.
        head: the head, which gives the loss.
        head_params: its weights before training.
        operative: text that replays the run as a configuration file.

    Returns:
        The folder of the trained head.

    Raises:
        SpecJaxError: data that cannot be used, a checkpoint of another run, or a diverged run.
    """
    data = rows.load(config, target.info.stop_ids)
    if config.features:
        data = from_cache(data, config, target.info, head)
    trainer = Trainer(config, target, target_params, head, head_params, data.train, data.heldout)
    display = Display(trainer.total)
    display.say(data.report)
    trainer.out.mkdir(parents=True, exist_ok=True)
    if hosts.is_lead():
        _write(trainer.out / "config.gin", operative)
    outcome = trainer.run(display)
    folder = trainer.out / "head"
    params = hosts.fetch(outcome.params)
    if hosts.is_lead():
        heads.save(head, params, folder, config.export_dtype)
        _write(folder / "README.md", model_card(config, head.name, outcome, data.report))
        display.say(f"head written to {folder}")
    return folder


def read_kept(path: str) -> np.ndarray:
    """Read the target ids of a draft vocabulary file (safetensors with "d2t"), ascending.

    Raises:
        DataError: no such file, or no "d2t" in it.
    """
    if not Path(path).expanduser().is_file():
        raise DataError(f"no draft vocabulary file {path}")
    reader = TensorReader(Path(path).expanduser())
    if "d2t" not in reader.shapes:
        raise DataError(f"{path} has no tensor d2t: scripts/draft_vocab.py writes such files")
    offsets = reader.read("d2t")
    return offsets + np.arange(len(offsets))


def model_card(config: TrainerConfig, algorithm: str, outcome: Outcome, report: str) -> str:
    """Return a short model card: what, from what, how, and what was measured in training."""
    words = sys.argv if sys.argv and sys.argv[0].endswith(".py") else ["train/<head>.py"]
    command = shlex.join(["python", os.path.relpath(words[0]), *words[1:]])
    return _CARD.format(
        algorithm=algorithm,
        target=Path(config.target).name,
        files=", ".join(Path(name).name for name in config.data.paths),
        report=report,
        steps=outcome.steps,
        start=f", starting from {Path(config.init_from).name}" if config.init_from else "",
        chosen=_chosen(outcome),
        batch=config.batch_size * config.accumulation,
        command=command,
        figures=json.dumps(_scalars(outcome.record), indent=2),
    )


_CARD = """---
library_name: specjax
tags: [speculative-decoding, {algorithm}]
---

# {algorithm} draft head for {target}

A draft head for lossless speculative decoding of {target}, trained by SpecJAX.

- Data: {files} ({report}).
- Training: {steps} steps of {batch} conversations{start}.
- Weights: {chosen}.
- Command: `{command}`

The last record of the training log (teacher-forced estimates; what was decoded is named so):

```json
{figures}
```
"""


def _chosen(outcome: Outcome) -> str:
    if outcome.best is None:
        return "of the last step"
    length = outcome.best.mean_acceptance_length
    return (
        f"of step {outcome.best.step}, the best by decoding held-out prompts (mean acceptance"
        f" length {length:.2f}, the bonus token included)"
    )


def _scalars(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in record.items()
        if not isinstance(value, list)
    }


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
