"""Llama-style dense decoders (Llama 3, SmolLM2, Mistral-like layouts without windows)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.core.published import required
from specjax.layers.blocks.dense import BlockConfig, DenseLayer
from specjax.targets.decoder import DecoderConfig, around, family


def read_dense(config: Mapping[str, Any], *, qk_norm: bool) -> DecoderConfig:
    """Read a published configuration whose layers are all alike."""
    (layers,) = required(config, "num_hidden_layers")
    block = BlockConfig.from_hf(config, qk_norm=qk_norm)
    return DecoderConfig(**around(config), kinds=(DenseLayer(block),) * layers, draft_block=block)


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a Llama `config.json`."""
    return read_dense(config, qk_norm=False)


FAMILY = family(read_config)
