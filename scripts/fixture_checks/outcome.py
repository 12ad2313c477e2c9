"""What a check hands back."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Outcome:
    """Computed tensors, and why others were not.

    Attributes:
        tensors: by the fixture's names.
        why_not: reasons for outputs that were not computed, by name.
        otherwise: reason for those that are named nowhere.
        ties: bool masks, True where a gradient is a matter of choice (the tie of a minimum) and
            is not compared.
    """

    tensors: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    why_not: dict[str, str] = dataclasses.field(default_factory=dict)
    otherwise: str = "nothing here computes a tensor of this name"
    ties: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
