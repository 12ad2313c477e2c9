"""Tiny targets of every family and tiny heads of every kind, with random weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import targets
from specjax.core.params import init_params
from specjax.heads.base import borrow
from specjax.targets.base import Target

PyTree = Any
VOCAB = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_GEMMA4 = _COMMON | {
    "model_type": "gemma4_text",
    "global_head_dim": 16,
    "sliding_window": 8,
    "final_logit_softcapping": 20.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"model_type": "llama"},
    "qwen3": _COMMON | {"model_type": "qwen3"},
    "qwen3_moe": _COMMON | _EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_5": _COMMON  # three delta nets, then attention
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
    },
    "gemma4": _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_moe": _GEMMA4
    | {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "gemma4_e": _GEMMA4  # the last two layers read what the first two keep
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "deepseek_v3": _COMMON
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "routed_scaling_factor": 2.5,
    },
    "minimax_m2": _COMMON
    | {
        "model_type": "minimax_m2",
        "intermediate_size": 12,
        "rotary_dim": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
HEADS = ("eagle3", "dflash", "dspark", "mtp", "gemma4_mtp")


def make_target(family: str, loop: str = "unroll") -> tuple[Target, PyTree]:
    """Return a family's tiny target and weights, the same wherever they are drawn."""
    target = targets.from_config(FAMILIES[family], targets.TargetConfig(layer_loop=loop))
    return target, init_params(target.specs(), jax.random.key(1), scale=0.2)


def make_head(kind: str, target: Target, params: PyTree) -> tuple[Any, PyTree]:
    """Return a tiny head for a target, its weights off their start so that all of it acts."""
    from specjax.heads.dflash.config import DFlashConfig
    from specjax.heads.dflash.head import DFlashHead
    from specjax.heads.eagle3.config import Eagle3Config
    from specjax.heads.eagle3.head import Eagle3Head
    from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
    from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
    from specjax.heads.mtp.config import MtpConfig
    from specjax.heads.mtp.head import MtpHead

    info = target.info
    if kind == "eagle3":
        assert info.draft_block is not None
        config = Eagle3Config(taps=(1, 2, 3), mlp=16, ttt_length=3)
        head: Any = Eagle3Head.for_target(info, info.draft_block, config)
    elif kind == "mtp":
        head = MtpHead.for_target(info, MtpConfig(steps=2))
    elif kind == "gemma4_mtp":
        head = Gemma4MtpHead.for_target(info, Gemma4MtpConfig(layers=2, hidden=16, steps=2))
    else:
        spark = kind == "dspark"
        settings = DFlashConfig(
            taps=(1, 2),
            block_size=4 if spark else 5,
            sample_from_anchor=spark,
            mask_token_id=VOCAB - 1,
            layers=2,
            mlp=16,
            markov_rank=4 if spark else 0,
            confidence=spark,
            confidence_with_markov=spark,
            num_anchors=6,
        )
        head = DFlashHead.for_target(info, settings)
    params = head.init(jax.random.key(2), borrow(target, params))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    moved = [
        x + 0.1 * jax.random.normal(k, x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for x, k in zip(leaves, keys, strict=True)
    ]
    return head, jax.tree.unflatten(tree, moved)
