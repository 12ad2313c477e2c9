"""Qwen3.5, dense and sparse: three layers with a gated delta net, then one with gated attention.

The text model alone; in a release it stands inside a multimodal wrapper. Its MTP module (`mtp.*`)
only drafts, and belongs to the head of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import CheckpointError
from specjax.core.published import required
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.blocks.qwen3_5 import DeltaNetLayer, FeedForward, GatedAttentionLayer
from specjax.layers.blocks.sparse import SparseConfig, SparseNames
from specjax.layers.deltanet import DeltaNetConfig
from specjax.layers.layer_kind import LayerKind
from specjax.layers.router import RouterConfig
from specjax.targets.decoder import DecoderConfig, around, family

_LINEAR, _FULL = "linear_attention", "full_attention"
_NAMES = SparseNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate.weight")
# Where a configuration does not say, as the published configuration class fills them in.
_INTERVAL, _ROTARY = 4, 0.25
# field -> the only value that this family computes
_FIXED = {
    "attn_output_gate": True,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the text part of a Qwen3.5 `config.json`.

    Raises:
        CheckpointError: a field is missing, or asks for something Qwen3.5 does not do.
    """
    for name, only in _FIXED.items():
        given = config.get(name)
        if given is not None and given != only:
            raise CheckpointError(f"config.json: {name} {given!r}; this family has {only!r}")
    key_heads, value_heads, key_dim, value_dim, kernel = required(
        config,
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    around_layers, feed_forward = around(config), _feed_forward(config)
    hidden, eps = around_layers["hidden"], around_layers["eps"]
    delta = DeltaNetConfig(hidden, key_heads, value_heads, key_dim, value_dim, kernel, eps)
    rotary = config.get("partial_rotary_factor")
    block = BlockConfig.from_hf(
        {
            **config,
            "partial_rotary_factor": _ROTARY if rotary is None else rotary,
            "layer_types": None,  # read below
            # Heads that draft for sparse targets are published three times as wide as the stream.
            "intermediate_size": feed_forward if isinstance(feed_forward, int) else 3 * hidden,
        },
        qk_norm=True,
    )
    kinds: dict[str, LayerKind] = {
        _LINEAR: DeltaNetLayer(delta, feed_forward),
        _FULL: GatedAttentionLayer(block, feed_forward),
    }
    return DecoderConfig(
        **around_layers,
        kinds=tuple(kinds[name] for name in _layer_types(config)),
        norm_offset=True,
        draft_block=block,
        draft_layer=kinds[_FULL],
        draft_modules=config.get("mtp_num_hidden_layers") or 0,
    )


def _feed_forward(config: Mapping[str, Any]) -> FeedForward:
    """Return the width of the dense feed-forward, or the sparse one; all layers are alike."""
    if config["model_type"] == "qwen3_5_text":
        return required(config, "intermediate_size")[0]
    hidden, count, top_k, width, shared = required(
        config,
        "hidden_size",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    )
    router = RouterConfig(experts=count, top_k=top_k, score="softmax", normalise=True)
    return SparseConfig(hidden, width, router, shared=shared, names=_NAMES)


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, out of either spelling."""
    (layers,) = required(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        every = config.get("full_attention_interval")
        every = _INTERVAL if every is None else every
        if every < 1:
            raise CheckpointError(
                f"config.json: full_attention_interval is {every}; it must be 1 or more"
            )
        types = [_LINEAR if (i + 1) % every else _FULL for i in range(layers)]
    if len(types) != layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(types)} layers, num_hidden_layers is {layers}"
        )
    if unknown := sorted(set(types) - {_LINEAR, _FULL}):
        raise CheckpointError(
            f"config.json: layer type {unknown[0]!r} is not supported; have {_LINEAR!r}, {_FULL!r}"
        )
    return list(types)


def ignored(config: DecoderConfig) -> tuple[str, ...]:
    """Return patterns of the MTP module's tensors."""
    del config
    return ("mtp.*",)


FAMILY = family(read_config, ignored)
