"""What a configuration can say about Gemma 4 MTP. Imports nothing heavy."""

import dataclasses
from typing import ClassVar, Literal

from specjax.core.errors import ConfigError
from specjax.heads.objective_config import Objective

Position = Literal["draft_window", "draft_serving"]


@dataclasses.dataclass(frozen=True)
class Gemma4MtpConfig:
    """A Gemma 4 MTP head: its shape, its conventions, and how it is trained.

    Attributes:
      layers: layers; all but the last read the target's sliding keys, if it has any.
      hidden: width; 0 takes a quarter of the target's.
      heads: query heads; 0 takes the target's.
      mlp: width of the MLPs; 0 takes eight times the head's own width.
      centroids: clusters of tokens; drafts come from the best of them. 0 scores every token.
      centroid_top_k: clusters whose tokens are scored.
      position: where the query of a round stands, with p tokens processed; "draft_window": at p,
        the place of the newest token (transformers); "draft_serving": at p - 1, the place of the
        last target state (serving engines). Sliding layers see a whole window of keys either way.
      steps: training steps k; step k learns the token k + 1 places behind the newest one.
      step_loss_decay: weight of step k is this to the power of k, over the sum of all.
      objective: loss of a step's rows, see Objective; its weighting goes by step where it is not
        "none", besides step_loss_decay.
      centroid_factor: of the loss that teaches the centroids which cluster the next token is in.
      remat: compute a step's activations anew in the backward pass instead of keeping them.
      greedy_drafts: draft the most probable token in sampled rows too.
    """

    layers: int = 4
    hidden: int = 0
    heads: int = 0
    mlp: int = 0
    centroids: int = 0
    centroid_top_k: int = 32
    position: Position = "draft_window"
    steps: int = 4
    step_loss_decay: float = 0.8
    objective: Objective = dataclasses.field(default_factory=Objective)
    centroid_factor: float = 1.0
    remat: bool = True
    greedy_drafts: bool = False

    TRAINING: ClassVar[tuple[str, ...]] = (
        "steps",
        "step_loss_decay",
        "objective",
        "centroid_factor",
        "remat",
    )
    """Settings of training: a head that is trained on takes them from the new run."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if min(self.hidden, self.heads, self.mlp, self.centroids) < 0:
            raise ConfigError("Gemma4Mtp.hidden, heads, mlp and centroids must not be negative")
        if min(self.layers, self.steps) < 1:
            raise ConfigError("Gemma4Mtp.layers and steps must be at least 1")
        if self.centroids and not 0 < self.centroid_top_k <= self.centroids:
            raise ConfigError(
                f"Gemma4Mtp.centroid_top_k must be in 1..{self.centroids} (centroids), not"
                f" {self.centroid_top_k}"
            )
        if self.position not in ("draft_window", "draft_serving"):
            raise ConfigError(
                f"Gemma4Mtp.position must be 'draft_window' or 'draft_serving', not"
                f" {self.position!r}"
            )
        if self.step_loss_decay <= 0 or self.centroid_factor < 0:
            raise ConfigError(
                "Gemma4Mtp.step_loss_decay must be positive and centroid_factor not negative"
            )
