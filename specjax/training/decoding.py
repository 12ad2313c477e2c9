"""Measuring a head while it trains, by decoding with it.

Losses and teacher-forced estimates are taken at every place of a text; real rounds start behind
rejections. So the head that decodes best is chosen by decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.core.errors import DataError
from specjax.data.chat import Encoded
from specjax.decode import Engine, EngineConfig, Request
from specjax.targets.base import Target
from specjax.training.config import TrainerConfig
from specjax.training.partition import cast_floats

PyTree = Any
MEASURED = "decoded_mean_acceptance_length"
_LANES = 8


@dataclasses.dataclass(frozen=True)
class Probe:
    """The decode loop on a few fixed prompts.

    Attributes:
        target: the target.
        head: the head.
        requests: the prompts, and how much is decoded of each.
        engine: settings; the programs are compiled at the first measurement.
        dtype: of the head's weights while it decodes.
    """

    target: Target
    head: Any
    requests: tuple[Request, ...]
    engine: EngineConfig
    dtype: str

    @classmethod
    def of(
        cls, config: TrainerConfig, target: Target, head: Any, rows: Sequence[Encoded]
    ) -> Probe | None:
        """Make the probe that a run asks for, None if it asks for none.

        Raises:
            DataError: no row is held out that has a prompt.
        """
        if not config.decode_every:
            return None
        room = target.info.max_context
        prompts = [prompt for row in rows if (prompt := opening(row))]
        new = config.decode_tokens
        requests = tuple(Request(prompt, new) for prompt in prompts if len(prompt) + new <= room)[
            : config.decode_prompts
        ]
        if not requests:
            raise DataError(
                "Trainer.decode_every decodes the prompts of held-out rows, and there are none:"
                " set Data.holdout"
            )
        drafts = config.num_speculative_tokens
        if head.max_tokens is not None:
            drafts = min(drafts, head.max_tokens)
        engine = EngineConfig(num_speculative_tokens=drafts, concurrency=min(_LANES, len(requests)))
        return cls(target, head, requests, engine, config.target_dtype)

    def measure(self, target_params: PyTree, params: PyTree) -> dict[str, Any]:
        """Decode all prompts greedily.

        Args:
            target_params: the target's weights.
            params: the head's.

        Returns:
            `decoded_mean_acceptance_length` (the bonus token included, over all rounds) and
            `decoded_reach` (per position, how often a round got that far).
        """
        params = cast_floats(params, self.dtype)
        engine = Engine(self.target, target_params, self.head, params, self.engine)
        results = engine.generate(self.requests)
        rounds = max(sum(result.rounds for result in results), 1)
        accepted = np.sum([result.accepted for result in results], axis=0)
        return {MEASURED: float(1 + accepted.sum() / rounds), "decoded_reach": accepted / rounds}


def opening(row: Encoded) -> tuple[int, ...]:
    """Return the tokens before the first that the assistant said; () where it began."""
    said = np.flatnonzero(row.mask)
    return tuple(int(token) for token in row.ids[: said[0]]) if len(said) else ()
