"""Qwen3 dense: Llama's block with a norm per head on queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.targets.decoder import DecoderConfig, family
from specjax.targets.llama import read_dense


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a Qwen3 `config.json`."""
    return read_dense(config, qk_norm=True)


FAMILY = family(read_config)
