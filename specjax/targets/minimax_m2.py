"""MiniMax-M2: norms over whole projections, partial rope, every layer sparse.

Queries and keys are normalised as one vector each, before the split into heads; the router scores
with a sigmoid and a learned correction that acts on the choice alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.core.errors import CheckpointError
from specjax.core.published import required
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.blocks.sparse import SparseConfig, SparseNames
from specjax.layers.blocks.sparse_layer import SparseLayer
from specjax.layers.router import RouterConfig
from specjax.targets.decoder import DecoderConfig, around, family

_NAMES = SparseNames(
    gate="block_sparse_moe.gate.weight",
    bias="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.",
    projections=("w1", "w3", "w2"),
)


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a MiniMax-M2 `config.json`; its MTP modules were declared but never published.

    Raises:
        CheckpointError: a field is missing, or asks for something MiniMax-M2 does not do.
    """
    layers, count, top_k, width = required(
        config,
        "num_hidden_layers",
        "num_local_experts",
        "num_experts_per_tok",
        "intermediate_size",
    )
    if not all(config.get("attn_type_list") or [1]):
        raise CheckpointError("config.json: attn_type_list has linear layers; MiniMax-M2 has none")
    if config.get("shared_intermediate_size"):
        raise CheckpointError("config.json: a shared expert is not supported for minimax_m2")
    if (score := config.get("scoring_func", "sigmoid")) != "sigmoid":
        raise CheckpointError(f"config.json: scoring_func {score!r}; minimax_m2 has 'sigmoid'")
    if (norm := config.get("qk_norm_type", "per_layer")) != "per_layer":
        raise CheckpointError(f"config.json: qk_norm_type {norm!r}; minimax_m2 has 'per_layer'")
    if not (bias := config.get("use_routing_bias", True)):
        raise CheckpointError(f"config.json: use_routing_bias {bias!r}; minimax_m2 has a bias")
    block = BlockConfig.from_hf(
        config, qk_norm=bool(config.get("use_qk_norm", True)), whole_norm=True
    )
    router = RouterConfig(experts=count, top_k=top_k, score="sigmoid", normalise=True)
    layer = SparseLayer(block, SparseConfig(block.hidden, width, router, names=_NAMES))
    # An expert's width is too narrow for a head; published ones have three times the stream's.
    draft = dataclasses.replace(block, qk_norm=False, whole_norm=False, mlp=3 * block.hidden)
    return DecoderConfig(**around(config), kinds=(layer,) * layers, draft_block=draft)


FAMILY = family(read_config)
