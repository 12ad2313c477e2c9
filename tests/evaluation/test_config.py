"""Settings that cannot be meant are refused with one line."""

from __future__ import annotations

from typing import Any

import pytest

from specjax import config as gin_config
from specjax.core.errors import ConfigError
from specjax.decode.config import EngineConfig
from specjax.evaluation.config import EvalConfig

REAL = {"target": "t", "head": "h", "prompts": "p"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "t"}, "Eval.head is not set"),
        ({"target": "t", "head": "none"}, "Eval.prompts is not set"),
        ({"head": "h"}, "without Eval.target"),
        ({**REAL, "repeats": 0}, "Eval.repeats is 0"),
        ({**REAL, "num_speculative_tokens": -1}, "Eval.num_speculative_tokens is -1"),
        ({**REAL, "num_speculative_tokens": 0}, 'use Eval.head = "none"'),
        ({**REAL, "baseline_dtypes": ("bfloat16",)}, "is not among Eval.baseline_dtypes"),
        ({"baseline_dtypes": ("float32", "float32")}, "repeats one"),
        ({"engine": EngineConfig(num_speculative_tokens=7)}, "set Eval.num_speculative_tokens"),
        ({"engine": EngineConfig(concurrency=8)}, "set Eval.concurrency"),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EvalConfig(**changes)


def test_default_is_the_embedded_one() -> None:
    assert EvalConfig().target == ""
    assert EvalConfig(**REAL).greedy
    assert not EvalConfig(**REAL, temperature=0.7).greedy


def test_command_line_reaches_the_fields() -> None:
    argv = ["Eval.repeats=5", "--gin.Eval.dtype=bfloat16", "Engine.prefill_chunk=64"]
    built = gin_config.parse(argv).build("Eval")
    assert (built.repeats, built.dtype, built.engine.prefill_chunk) == (5, "bfloat16", 64)
