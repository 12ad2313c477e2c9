"""Gemma 4: sliding and full layers in turn; some sizes with experts, some with per-layer inputs.

The small ones (E2B, E4B) feed each layer an input of its own per token, and their last layers read
the keys and values of the last layer of their kind that has any. The large ones take the keys of
full layers for values; 26B-A4B has experts beside each MLP. Output layer tied, logits capped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import CheckpointError
from specjax.core.published import required
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.blocks.gemma4 import Gemma4Layer
from specjax.layers.blocks.gemma4_config import read_layers
from specjax.layers.blocks.gemma4_inputs import PerLayerInputs
from specjax.targets.decoder import DecoderConfig, around, family

__all__ = ["FAMILY", "ignored", "read_config"]


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the text part of a Gemma 4 `config.json`.

    Raises:
        CheckpointError: a field is missing, or asks for something this family does not do.
    """
    layers = read_layers(config)
    frame = {**around(config), "tied": bool(config.get("tie_word_embeddings", True))}
    return DecoderConfig(
        **frame,
        kinds=layers,
        embed_scale=frame["hidden"] ** 0.5,
        softcap=config.get("final_logit_softcapping"),
        extra=_per_layer_inputs(config, layers[0].inputs) if layers[0].inputs else None,
        draft_block=_draft_block(layers[0]),
    )


def _draft_block(first: Gemma4Layer) -> BlockConfig:
    """Return an ordinary block with the sizes of the first layer, as published heads have it."""
    attention = first.attention
    return BlockConfig(
        hidden=attention.hidden,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        mlp=first.mlp,
        eps=attention.eps,
        rope=attention.rope,
    )


def ignored(config: DecoderConfig) -> tuple[str, ...]:
    """Return patterns of the dead keys and values that releases carry for layers without any."""
    return tuple(
        f"model.layers.{i}.self_attn.{name}.*"
        for i, kind in enumerate(config.kinds)
        if kind.cache is None
        for name in ("k_proj", "v_proj", "k_norm")
    )


def _per_layer_inputs(config: Mapping[str, Any], size: int) -> PerLayerInputs:
    layers, hidden, vocab, rows = required(
        config, "num_hidden_layers", "hidden_size", "vocab_size", "vocab_size_per_layer_input"
    )
    if rows < vocab:
        raise CheckpointError(
            f"config.json: vocab_size_per_layer_input {rows} is below vocab_size {vocab}"
        )
    return PerLayerInputs(layers, hidden, size, rows, float(config.get("rms_norm_eps", 1e-6)))


FAMILY = family(read_config, ignored)
