"""Heads that draft to trip a target up, and a tiny random target of every family to be tripped."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import targets
from specjax.core.params import map_specs
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal
from specjax.layers.sampling import PURPOSE_DRAFT, Sampling, draw

VOCAB, WINDOW = 64, 8
_COMMON = {
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
}
_GEMMA4 = _COMMON | {
    "model_type": "gemma4_text",
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"model_type": "llama"},
    "qwen3": _COMMON | {"model_type": "qwen3"},
    "qwen3_moe": _COMMON
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
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
    "gemma4": _GEMMA4
    | {
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4_moe": _GEMMA4
    | {
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "gemma4_e": _GEMMA4  # the last two layers read what the first two keep
    | {
        "num_hidden_layers": 4,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
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


def tiny(
    name: str, loop: str = "unroll", seed: int = 3, **changes: Any
) -> tuple[targets.Target, Any]:
    """Return a family's tiny target and random weights that bfloat16 holds exactly.

    Norms are off their start, and the states of delta nets last for a dozen tokens.
    """
    how = targets.TargetConfig(layer_loop=loop)
    target = targets.from_config(CONFIGS[name] | changes, how)
    rng = np.random.default_rng(seed)

    def weight(spec: Any) -> jax.Array:
        start = -2.0 if spec.hf.endswith("A_log") else float(spec.init == "ones")
        drawn = rng.normal(start, 0.3, spec.shape).astype(jnp.bfloat16)
        return jnp.asarray(drawn, jnp.float32)

    return target, map_specs(weight, target.specs())


def trap(script: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Return drafts `[N, S, num]` for row n when it is s tokens long.

    Each is of one of four sorts: random tokens, the true continuation, a true prefix and then
    wrong tokens, wrong tokens only.

    Args:
        script: `[N, S]` every prompt with its true continuation.
        num: drafts per round K, at least 2.
        rng: where chance comes from.
    """
    rows, size = script.shape
    at = np.minimum(np.arange(size)[:, None] + np.arange(num), size - 1)
    true = script[:, at]
    wrong = (true + rng.integers(1, VOCAB, true.shape)) % VOCAB
    anything = rng.integers(0, VOCAB, true.shape)
    sort = rng.integers(0, 4, (rows, size, 1))
    good = np.choose(sort, [0, num, rng.integers(1, num, sort.shape), 0])
    drafts = np.where(np.arange(num) < good, true, np.where(sort == 0, anything, wrong))
    return drafts.astype(np.int32)


@struct.dataclass
class Traps:
    """The weights of `Adversary`.

    Attributes:
        first: `[N]` the token that each row's prompt begins with.
        drafts: `[N, S, K]` what to draft for row n when it is s tokens long.
    """

    first: jax.Array
    drafts: jax.Array


class _Forgetful:
    """What heads without weights of their own and without a state have in common."""

    name: ClassVar[str] = "ngram"
    taps: ClassVar[tuple[int, ...]] = ()
    max_tokens: ClassVar[int | None] = None
    reads: ClassVar[tuple[int, ...]] = ()

    def specs(self) -> Any:
        return ()

    def init_state(self, batch: int, capacity: int, dtype: str) -> Any:
        return ()

    def observe(self, params: Any, borrowed: Borrowed, state: Any, obs: Observation) -> Any:
        return state


@dataclasses.dataclass(frozen=True)
class Adversary(_Forgetful):
    """Drafts what its table says for this row at this length."""

    def propose(
        self, params: Any, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        row = jnp.argmax(params.first[None] == context.tokens[:, :1], axis=1)
        return Proposal(tokens=params.drafts[row, context.lengths, :num])


@dataclasses.dataclass(frozen=True)
class Gambler(_Forgetful):
    """Draws each draft from a law that depends on its place alone, whatever was said before.

    Its weights are logits `[S, V]`. A `certain` one drafts their argmax, a point mass.
    """

    certain: bool = False

    def propose(
        self, params: Any, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        sampling: Sampling = context.sampling
        if self.certain:
            sampling = sampling.replace(temperature=jnp.zeros_like(sampling.temperature))
        slots = [
            draw(params[context.lengths + k], sampling, context.lengths + k, PURPOSE_DRAFT + k)
            for k in range(num)
        ]
        tokens, probs = (jnp.stack(parts, axis=1) for parts in zip(*slots, strict=True))
        return Proposal(tokens=tokens, probs=None if self.certain else probs)
