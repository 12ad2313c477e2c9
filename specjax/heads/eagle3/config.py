"""What a configuration can say about heads. Imports nothing heavy, so that `--help` is fast."""

import dataclasses
from typing import ClassVar

from specjax.core.errors import ConfigError
from specjax.heads.objective_config import Objective

_OBJECTIVE = Objective(terms=("soft_ce",), normaliser="counted")


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head: its shape where it may differ from the target's, and how it is trained.

    Attributes:
      taps: residual streams of the target that the head reads (0 is the embedding output); ()
        takes 2, L // 2 and L - 3 of L layers.
      draft_vocab: file with the target ids that the head can draft; "" drafts any token.
      heads: query heads of the head's layer; 0 takes the target's.
      kv_heads: key-value heads; 0 takes the target's.
      head_dim: size of a head; 0 takes the target's.
      mlp: width of the MLP; 0 takes the target's.
      norm_before_residual: add the attention to the normed state instead of the raw one.
      norm_before_fc: one norm over all tapped states together.
      fc_norm: one norm per tapped state.
      norm_output: carry the normed output to the next step.
      train_output: train the output layer over a draft vocabulary, which starts as the target's
        rows; off, it stays these rows.
      ttt_length: steps of the training-time test.
      step_loss_decay: weight of step s is this to the power of s.
      objective: loss of a step's rows, see Objective; its weighting goes by step where it is not
        "none", besides step_loss_decay.
      mask_shift: row i, which predicts token i + 2, counts if token i + mask_shift is supervised;
        0 is DeepSpec's and SafeAILab's rule, 1 that of speculators, 2 counts exactly the answers.
      in_vocab_only: count only rows whose best token the head can draft.
      drop_tail: at step s leave the last s rows out of the attention, as DeepSpec does; only rows
        that never count change.
      remat: compute a step's activations anew in the backward pass instead of keeping them.
      greedy_drafts: draft the most probable token in sampled rows too.
    """

    taps: tuple[int, ...] = ()
    draft_vocab: str = ""
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    mlp: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    train_output: bool = True
    ttt_length: int = 7
    step_loss_decay: float = 0.8
    objective: Objective = _OBJECTIVE
    mask_shift: int = 0
    in_vocab_only: bool = True
    drop_tail: bool = False
    remat: bool = True
    greedy_drafts: bool = False

    TRAINING: ClassVar[tuple[str, ...]] = (
        "train_output",
        "ttt_length",
        "step_loss_decay",
        "objective",
        "mask_shift",
        "in_vocab_only",
        "drop_tail",
        "remat",
    )
    """Settings of training: a head that is trained on takes them from the new run."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if self.ttt_length < 1:
            raise ConfigError(f"Eagle3.ttt_length must be at least 1, not {self.ttt_length}")
        if self.step_loss_decay <= 0:
            raise ConfigError(
                f"Eagle3.step_loss_decay must be positive, not {self.step_loss_decay}"
            )
        if self.mask_shift not in (0, 1, 2):
            raise ConfigError(f"Eagle3.mask_shift must be 0, 1 or 2, not {self.mask_shift}")
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError("Eagle3.fc_norm and Eagle3.norm_before_fc exclude each other")
        if min(self.heads, self.kv_heads, self.head_dim, self.mlp) < 0:
            raise ConfigError("Eagle3.heads, kv_heads, head_dim and mlp must not be negative")
