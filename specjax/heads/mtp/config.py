"""What a configuration can say about Native MTP. Imports nothing heavy."""

import dataclasses
from typing import ClassVar, Literal

from specjax.core.errors import ConfigError
from specjax.heads.objective_config import Objective

_OBJECTIVE = Objective(terms=("hard_ce",), normaliser="counted")  # FastMTP's


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """Native MTP: how many modules, what they hand on, and how they are trained.

    Attributes:
      modules: modules, each of one layer of the target's kind; 0 takes as many as the target's
        checkpoint has, or one.
      reuse: run the last module again on its own output for drafts beyond the number of modules;
        off, a round drafts at most one token per module.
      carried: the state handed on; "normed": a module's output behind its last norm; "raw": the
        output before it, as one serving engine does for DeepSeek.
      zero_first: put zeros for the embedding that goes with the text's first state, a habit of the
        same engine that loses the second token.
      steps: steps of training, each a pass over the whole text one token further on.
      beta: step k weighs beta ** k, divided by the sum over steps.
      objective: loss of a step's positions, see Objective.
      remat: compute a step's activations anew in the backward pass instead of keeping them.
      greedy_drafts: draft the most probable token in sampled rows too.
    """

    modules: int = 0
    reuse: bool = True
    carried: Literal["normed", "raw"] = "normed"
    zero_first: bool = False
    steps: int = 3
    beta: float = 0.6
    objective: Objective = _OBJECTIVE
    remat: bool = True
    greedy_drafts: bool = False

    TRAINING: ClassVar[tuple[str, ...]] = (
        "steps",
        "beta",
        "objective",
        "remat",
    )
    """Settings of training: a head that is trained on takes them from the new run."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if self.modules < 0:
            raise ConfigError(f"Mtp.modules must not be negative, not {self.modules}")
        if self.carried not in ("normed", "raw"):
            raise ConfigError(f"Mtp.carried {self.carried!r} does not exist; have normed, raw")
        if self.steps < 1:
            raise ConfigError(f"Mtp.steps must be at least 1, not {self.steps}")
        if self.beta <= 0:
            raise ConfigError(f"Mtp.beta must be positive, not {self.beta}")
