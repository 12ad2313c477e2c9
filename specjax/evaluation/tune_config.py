"""Settings of tuning. Imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import dataclasses

from specjax.core.errors import ConfigError
from specjax.decode.config import EngineConfig
from specjax.evaluation.config import EvalConfig

_CHOSEN = ("verification", "confidence_threshold", "verify_widths", "cost_table")


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """How to look for the best setting.

    Attributes:
      most: largest number of drafts that is looked at; 0 takes the head's own, or 8 where it has
        none.
      confirm: how many of the best predicted settings are run.
      thresholds: confidences to try as Engine.confidence_threshold, where the head gives any.
    """

    most: int = 0
    confirm: int = 3
    thresholds: tuple[float, ...] = (0.3, 0.5, 0.7)

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        for name, least in (("most", 0), ("confirm", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"Tune.{name} is {getattr(self, name)}; it must be at least {least}"
                )
        for value in self.thresholds:
            if not 0 < value < 1:
                raise ConfigError(f"Tune.thresholds has {value}; give values between 0 and 1")


def check(config: EvalConfig) -> None:
    """Refuse an evaluation that leaves nothing to tune, or sets what tuning is to find.

    Raises:
        ConfigError: what and why.
    """
    if config.head == "none":
        raise ConfigError("Eval.head is none: there is nothing to tune without a draft head")
    for name in ("head", "prompts"):
        if "," in getattr(config, name):
            raise ConfigError(f"Eval.{name} lists several: one is tuned at a time")
    if config.max_new_tokens < 2:
        raise ConfigError("Eval.max_new_tokens is 1: the first token comes without drafting")
    fields = EngineConfig.__dataclass_fields__
    for name in _CHOSEN:
        if getattr(config.engine, name) != fields[name].default:
            raise ConfigError(f"Engine.{name} is set, but it is what tuning chooses: leave it out")
