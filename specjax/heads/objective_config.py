"""What a configuration can say about the loss of a slot. Imports nothing heavy."""

import dataclasses
from typing import Literal

from specjax.core.errors import ConfigError

Term = Literal[
    "hard_ce",
    "soft_ce",
    "ce",
    "kl_div",
    "rkl",
    "jsd",
    "tv",
    "l1",
    "nla",
    "lk_hybrid",
    "lk_alpha",
    "lk_lambda",
]
Weighting = Literal["none", "dflash", "dflash_from_anchor", "exp", "dpace"]
Normaliser = Literal["all", "counted", "counted_per_row", "weights", "weights_eps", "rows"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a head learns from its slots: loss terms, weights of the slots, and what divides.

    Attributes:
      terms: loss terms that are added. "hard_ce" takes the text's token as right, "ce" the
        target's most probable one; the others compare with the target's whole distribution.
        "lk_alpha" and "lk_lambda" work on the means of a step (of all slots, in a block head).
      factors: of each term; () takes 1 for all.
      weighting: how much a slot k of a block counts; "dflash": 0 for slot 0, then
        exp(-(k - 1) / gamma); "dflash_from_anchor": exp(-k / gamma); "exp": base ** k; "dpace":
        by how far the head is expected to get. Where a head is unrolled, the steps are the slots.
      gamma: slots until the weight has fallen by e.
      base: of "exp".
      dpace_alpha: smoothing of "dpace".
      lk_eta: of lk_hybrid.
      lk_scale: of lk_alpha and lk_lambda: factor of the one, greatest weight of the cross entropy
        in the other.
      lk_decay: of lk_lambda: how fast that weight falls with the acceptance.
      normaliser: what a sum is divided by; "all": slots, padding included (EAGLE, DeepSpec's
        EAGLE-3); "counted": slots that count, at least one (MTP); "counted_per_row": those of a
        row, then the mean of rows (speculators); "weights": sum of the weights (z-lab);
        "weights_eps": the same + 1e-6 (DeepSpec's blocks); "rows": rows (z-lab with D-PACE).
    """

    terms: tuple[Term, ...] = ("hard_ce",)
    factors: tuple[float, ...] = ()
    weighting: Weighting = "none"
    gamma: float = 4.0
    base: float = 0.8
    dpace_alpha: float = 0.5
    lk_eta: float = 3.0
    lk_scale: float = 1.0
    lk_decay: float = 3.0
    normaliser: Normaliser = "counted"

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if not self.terms or len(set(self.terms)) != len(self.terms):
            raise ConfigError(f"Objective.terms {list(self.terms)} must name each term once")
        if self.factors and len(self.factors) != len(self.terms):
            raise ConfigError(
                f"Objective.factors has {len(self.factors)} numbers for {len(self.terms)} terms"
            )
        if self.gamma <= 0 or self.base <= 0:
            raise ConfigError("Objective.gamma and Objective.base must be positive")
        if not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"Objective.dpace_alpha must be in 0..1, not {self.dpace_alpha}")
        if self.weighting == "dpace" and not {"ce", "hard_ce"} & set(self.terms):
            raise ConfigError('Objective.weighting "dpace" needs "ce" or "hard_ce" among the terms')

    @property
    def shares(self) -> dict[str, float]:
        """Factor of each term."""
        factors = self.factors or (1.0,) * len(self.terms)
        return dict(zip(self.terms, factors, strict=True))
