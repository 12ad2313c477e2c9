"""Qwen3 dense: Llama's block with a norm per head on queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.targets import llama
from specjax.targets.llama import DenseConfig, read_dense


def read_config(config: Mapping[str, Any]) -> DenseConfig:
    """Read a Qwen3 `config.json`."""
    return read_dense(config, qk_norm=True)


FAMILY = dataclasses.replace(llama.FAMILY, read_config=read_config)
