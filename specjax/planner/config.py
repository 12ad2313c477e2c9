"""Settings of the planner. Imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import dataclasses
from typing import Literal

from specjax.core.errors import ConfigError
from specjax.core.mesh_config import MeshConfig
from specjax.targets.config import TargetConfig


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """What to plan.

    Attributes:
      target: a name of the catalogue (`specjax targets`), in any case, or a checkpoint directory.
      head: a name of the catalogue (`specjax heads`), an algorithm (dflash, dspark, eagle3, mtp,
        gemma4_mtp: the catalogue's head of that kind for the target), ngram, or a directory.
      chip: a name of the table (`planner.chips`), or cpu for this machine, which is then timed.
      acceptance: rates at which drafts 1, 2, ... are accepted, as "0.8,0.6,0.5", each counted over
        all rounds; or a results directory of an evaluation with this head. "" tells what it takes
        to break even.
      batches: numbers of lanes to look at.
      contexts: lengths of text, prompt and answer together, to look at.
      most: largest number of drafts to look at; 0 takes the head's own, at most 8.
      dtype: of what is computed, of caches, and of weights that are not stored packed.
      memory_gb: memory of a device instead of the table's, in 10^9 bytes.
      bandwidth_gb: bytes per second between its memory and its units instead of the table's, in
        10^9.
      peak_tflops: FLOPs per second in `dtype` instead of the table's, in 10^12.
      link_gb: bytes per second that a device sends to the others instead of the table's, in 10^9.
      usable: part of the memory that weights, caches and temporaries may take.
      out: directory for plan.json and the figure.
      mesh: how many devices, and how they share the work.
      how: how the target is held and run.
    """

    target: str = "SmolLM2-135M-Instruct"
    head: str = "ngram"
    chip: str = "cpu"
    acceptance: str = ""
    batches: tuple[int, ...] = (1, 8, 32, 128)
    contexts: tuple[int, ...] = (2048, 8192)
    most: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    memory_gb: float = 0.0
    bandwidth_gb: float = 0.0
    peak_tflops: float = 0.0
    link_gb: float = 0.0
    usable: float = 0.9
    out: str = "runs/plan"
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    how: TargetConfig = dataclasses.field(default_factory=TargetConfig)

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        for name in ("batches", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1 or list(values) != sorted(set(values)):
                raise ConfigError(f"Plan.{name} must be ascending numbers from 1 on, got {values}")
        if min(self.contexts) < 64:
            raise ConfigError(f"Plan.contexts begins at {min(self.contexts)}; at least 64 is meant")
        for name in ("most", "memory_gb", "bandwidth_gb", "peak_tflops", "link_gb"):
            if getattr(self, name) < 0:
                raise ConfigError(f"Plan.{name} is {getattr(self, name)}; it must not be negative")
        if not 0 < self.usable <= 1:
            raise ConfigError(f"Plan.usable is {self.usable}; give a part between 0 and 1")
