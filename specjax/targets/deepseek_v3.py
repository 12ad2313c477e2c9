"""DeepSeek-V3 and the text model of Kimi-K2.5: latent attention, first dense layers, then sparse.

The router scores with a sigmoid, picks groups of experts first, and corrects the choice (never
the weights) by a learned bias (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import CheckpointError
from specjax.core.published import required
from specjax.layers.blocks.deepseek import DeepseekLayer
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.blocks.sparse import SparseConfig, SparseNames
from specjax.layers.mla import MlaConfig
from specjax.layers.router import RouterConfig
from specjax.targets.decoder import DecoderConfig, around, family

_NAMES = SparseNames(bias="mlp.gate.e_score_correction_bias")
# field -> the only value that this family computes
_FIXED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
}


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a DeepSeek-V3 `config.json`, or the text part of Kimi-K2.5's.

    Raises:
        CheckpointError: a field is missing, or asks for something this family does not do.
    """
    for name, only in _FIXED.items():
        if config.get(name, only) != only:
            raise CheckpointError(f"config.json: {name} {config[name]!r}; this family has {only!r}")
    layers, dense, width, count, top_k, narrow = required(
        config,
        "num_hidden_layers",
        "first_k_dense_replace",
        "intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    )
    attention = MlaConfig.from_hf(config)
    router = RouterConfig(
        experts=count,
        top_k=top_k,
        score="sigmoid",
        normalise=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor", 1.0)),
        groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1,
    )
    sparse = SparseConfig(
        hidden=attention.hidden,
        width=narrow,
        router=router,
        shared=narrow * (config.get("n_shared_experts") or 0),
        names=_NAMES,
    )
    kinds = [DeepseekLayer(attention, width if i < dense else sparse) for i in range(layers)]
    # Draft heads for this family attend with ordinary heads as wide as the target's values, turned
    # whole (of an odd width, all dims but the last).
    rope = {"rope_theta": attention.rope.theta}
    width_of_head = {"head_dim": attention.v_dim, "rotary_dim": attention.v_dim // 2 * 2}
    draft = BlockConfig.from_hf(
        {**config, **width_of_head, "rope_parameters": rope, "rope_scaling": None}, qk_norm=False
    )
    return DecoderConfig(
        **around(config),
        kinds=tuple(kinds),
        draft_block=draft,
        draft_layer=DeepseekLayer(attention, sparse),
        draft_modules=config.get("num_nextn_predict_layers") or 0,
    )


def ignored(config: DecoderConfig) -> tuple[str, ...]:
    """Return patterns of the MTP modules, which stand behind the last layer and only draft."""
    first = len(config.kinds)
    return tuple(f"model.layers.{first + i}.*" for i in range(config.draft_modules))


FAMILY = family(read_config, ignored)
