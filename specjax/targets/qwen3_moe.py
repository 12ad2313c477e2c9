"""Qwen3-MoE: Qwen3's attention, and in most layers a mixture of experts for the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import CheckpointError
from specjax.core.published import required
from specjax.layers.blocks.dense import BlockConfig, DenseLayer
from specjax.layers.blocks.sparse import SparseConfig
from specjax.layers.blocks.sparse_layer import SparseLayer
from specjax.layers.router import RouterConfig
from specjax.targets.decoder import DecoderConfig, around, family

__all__ = ["FAMILY", "read_config"]


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a Qwen3-MoE `config.json`.

    Layers are sparse but for those in `mlp_only_layers` and those that `decoder_sparse_step`
    leaves out.

    Raises:
        CheckpointError: a field is missing, or asks for something this family does not do.
    """
    layers, top_k, width = required(
        config, "num_hidden_layers", "num_experts_per_tok", "moe_intermediate_size"
    )
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        raise CheckpointError("config.json lacks num_experts (or num_local_experts)")
    block = BlockConfig.from_hf(config, qk_norm=True)
    router = RouterConfig(
        experts=count,
        top_k=top_k,
        score="softmax",
        normalise=bool(config.get("norm_topk_prob", False)),
    )
    sparse = SparseLayer(block, SparseConfig(block.hidden, width, router))
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    if not isinstance(step, int) or step < 1:
        raise CheckpointError(f"config.json: decoder_sparse_step {step!r}; it must be at least 1")
    kinds = tuple(
        DenseLayer(block) if i in dense or (i + 1) % step else sparse for i in range(layers)
    )
    return DecoderConfig(**around(config), kinds=kinds, draft_block=block)


FAMILY = family(read_config)
