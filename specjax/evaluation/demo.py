"""The embedded default: a tiny target and head with random weights, made here in a moment.

It shows the whole path and nothing else; no figure measured on it says anything about a method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import targets
from specjax.core.params import init_params
from specjax.core.sharding import Layout
from specjax.heads.base import Borrowed
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.targets.base import Target
from specjax.targets.config import TargetConfig

PyTree = Any

NAME = "tiny-random"
NOTICE = (
    "This is the embedded default: a tiny target and head with RANDOM weights. It shows the whole "
    "path; its figures mean nothing. Give --target, --head and --prompts for real ones."
)
PROMPTS = 8

_CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_SCALE = 0.1  # of random weights: large enough for logits to differ by more than rounding


def models(
    dtypes: Sequence[str],
    head_dtype: str,
    how: TargetConfig | None = None,
    layout: Layout | None = None,
) -> tuple[Target, dict[str, Any], Any, PyTree]:
    """Return (target, its weights by dtype, head, head weights in `head_dtype`), on a mesh or not.

    Raises:
        ConfigError: a mesh that the weights do not fit.
    """
    target = targets.from_config(_CONFIG, how)
    full = init_params(target.specs(), jax.random.key(0), "float32", _SCALE)
    params = {dtype: jax.tree.map(lambda leaf, d=dtype: leaf.astype(d), full) for dtype in dtypes}
    head = Eagle3Head.for_target(
        target.info,
        target.info.draft_block,
        Eagle3Config(taps=(1, 2, 3)),
        draft_vocab=target.info.vocab // 2,
    )
    borrowed = Borrowed(embedding=target.input_embedding(full), output=target.output_weights(full))
    kept = np.arange(head.draft_vocab)
    head_params = head.init(jax.random.key(1), borrowed, kept, head_dtype)
    if layout is not None:
        params = jax.device_put(params, dict.fromkeys(params, layout.weights(target.specs())))
        head_params = jax.device_put(head_params, layout.weights(head.specs()))
        target = dataclasses.replace(target, layout=layout)
    return target, params, head, head_params


def prompts(target: Target, count: int = 0) -> list[tuple[int, ...]]:
    """Return random prompts of different lengths, `count` of them or all."""
    rng = np.random.default_rng(0)
    lengths = [9 + i for i in range(PROMPTS)][: count or PROMPTS]
    return [tuple(int(i) for i in rng.integers(target.info.vocab, size=n)) for n in lengths]
