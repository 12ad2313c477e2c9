"""Every head on every family that it can be built for, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from specjax.core.params import map_specs
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead
from specjax.heads.ngram import NgramHead
from specjax.heads.small_model import SmallModelHead
from specjax.targets.base import TargetInfo
from tests.decode.adversary import CONFIGS, tiny

MOST = 7
"""Drafts per round that every head here can give."""


def _dflash(info: TargetInfo) -> Any:
    return DFlashConfig(
        taps=(1, 2),
        block_size=MOST + 1,
        mask_token_id=info.vocab - 1,
        layers=2,
        layer_types=("sliding", "full"),
        sliding_window=6,
    )


def _dspark(info: TargetInfo) -> Any:
    return DFlashConfig(
        taps=(1, 2),
        block_size=MOST,
        sample_from_anchor=True,
        mask_token_id=info.vocab - 1,
        layers=2,
        markov_rank=6,
        markov_head="rnn",
        confidence=True,
        confidence_with_markov=True,
    )


MAKERS: dict[str, Callable[[TargetInfo], Any]] = {
    "eagle3": lambda info: Eagle3Head.for_target(info, info.draft_block, Eagle3Config(taps=(1, 2))),
    "dflash": lambda info: DFlashHead.for_target(info, _dflash(info)),
    "dspark": lambda info: DFlashHead.for_target(info, _dspark(info)),
    "mtp": lambda info: MtpHead.for_target(info, MtpConfig(modules=2)),
    "gemma4_mtp": lambda info: Gemma4MtpHead.for_target(
        info, Gemma4MtpConfig(layers=3, hidden=16, heads=4, mlp=24)
    ),
    "ngram": lambda info: NgramHead(),
    "small_model": lambda info: SmallModelHead.for_target(
        info, tiny("llama", seed=9, vocab_size=info.vocab)[0]
    ),
}
"""Head by name, for a target's facts."""

CELLS = tuple(
    (head, family)
    for family in CONFIGS
    for head in MAKERS
    if not (head == "gemma4_mtp" and family == "deepseek_v3")  # it has no ordinary keys
)


def make(name: str, info: TargetInfo) -> tuple[Any, Any]:
    """Return (head, random weights)."""
    head = MAKERS[name](info)
    keys = iter(jax.random.split(jax.random.key(11), 1000))

    def weight(spec: Any) -> jax.Array:
        drawn = 0.3 * jax.random.normal(next(keys), spec.shape)
        return (drawn + (spec.init == "ones")).astype(spec.dtype or "float32")

    return head, map_specs(weight, head.specs())
