"""Starting from a head that exists instead of fresh weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax import heads
from specjax.core.errors import ConfigError
from specjax.heads.base import borrow
from specjax.targets.base import Target
from specjax.training.config import TrainerConfig

PyTree = Any


def warm_start(
    config: TrainerConfig, target: Target, target_params: PyTree, settings: Any, name: str
) -> tuple[Any, PyTree, str]:
    """Import the head that a run starts from.

    Args:
        config: the run; `init_from` names the head.
        target: the target.
        target_params: its weights.
        settings: of the head's kind; those of its training replace the imported ones.
        name: of the configurable that `settings` are.

    Returns:
        (head, weights in float32, one line on what was imported and which settings have no part).

    Raises:
        ConfigError: a head of another kind, or a draft vocabulary beside the head's own.
        PairingError: the head does not fit the target.
        CheckpointError: no head, or a malformed one.
    """
    head, params = heads.find(
        config.init_from, config.target, target.info, borrowed=borrow(target, target_params)
    )
    own = getattr(head, "config", None)
    if type(own) is not type(settings):
        raise ConfigError(
            f"Trainer.init_from={config.init_from} is a head of kind {head.name}, which is not"
            f" trained by the settings of {name}"
        )
    if getattr(settings, "draft_vocab", ""):
        raise ConfigError(
            f"{name}.draft_vocab and Trainer.init_from exclude each other: the head brings its own"
        )
    here = {field: getattr(settings, field) for field in settings.TRAINING}
    started = dataclasses.replace(head, config=dataclasses.replace(own, **here))
    said = f"starting from {config.init_from}, a head of kind {head.name}"
    ignored = [
        f"{name}.{field.name}"
        for field in dataclasses.fields(settings)
        if field.name not in settings.TRAINING
        and getattr(settings, field.name) not in (field.default, getattr(own, field.name))
    ]
    if ignored:
        said += f"; its shape is its own, so these have no part: {', '.join(ignored)}"
    return started, params, said
