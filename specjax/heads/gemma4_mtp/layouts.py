"""Released Gemma 4 assistants: `config.json` and tensors, both ways.

A pair of target and assistant has one geometry of keys, written in both configurations. What the
assistant's says is compared with the target's, and the target's is taken. Heads for other targets
are written in the same words; where rope, window and sizes come from is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from specjax.core.errors import CheckpointError, PairingError
from specjax.core.published import required
from specjax.heads import pairing
from specjax.heads.base import Borrowed
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig, Position
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead, last_key_layers
from specjax.heads.gemma4_mtp.network import AssistantWeights
from specjax.heads.released import Shapes, check_sizes, save_head
from specjax.io.hf import TensorReader, load_params, read_config, resolve
from specjax.layers.blocks.gemma4 import Gemma4Attention, Gemma4Layer
from specjax.layers.blocks.gemma4_config import read_layers
from specjax.layers.rope import RopeConfig
from specjax.targets.base import KeyLayer, TargetInfo

_ARCHITECTURES = {
    "gemma4_assistant": "Gemma4AssistantForCausalLM",
    "gemma4_unified_assistant": "Gemma4UnifiedAssistantForCausalLM",
}
_POSITION = "specjax_position"  # our own word for what released configurations cannot say
_WINDOW = 512  # transformers wants one also where no layer has any
_CENTROIDS, _TOP_K = 2048, 32  # what released heads without clusters have written all the same
_TABLE = "masked_embedding.token_ordering"


def recognises(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a Gemma 4 assistant."""
    if config.get("model_type") in _ARCHITECTURES:
        return True
    return bool(set(config.get("architectures") or ()) & set(_ARCHITECTURES.values()))


def load(
    path: str | Path,
    info: TargetInfo,
    dtype: str = "float32",
    shardings: Any | None = None,
    borrowed: Borrowed | None = None,
) -> tuple[Gemma4MtpHead, AssistantWeights]:
    """Load an assistant for a target.

    Args:
        path: directory or hub id.
        info: facts of the target it shall serve.
        dtype: dtype in memory.
        shardings: as in `io.hf.load_params`.
        borrowed: the target's embedding and output layer, to check that they are the right ones.

    Raises:
        PairingError: assistant and target do not belong together.
        CheckpointError: a malformed checkpoint; tensors that do not fit are all named.
    """
    root = resolve(path)
    config, reader = read_config(root), TensorReader(root)
    pairing.check(config, borrowed, str(root))
    head = read_head(config, reader.shapes, info, str(root))
    # The output layer is the embedding; some savers write it a second time.
    params = load_params(head.specs(), reader, dtype, shardings, ignore=("lm_head.weight",))
    if params.clusters is not None:
        _check_ordering(params.clusters.ordering, str(root))
    return head, params


def save(
    head: Gemma4MtpHead, params: AssistantWeights, path: str | Path, dtype: str | None = None
) -> None:
    """Write an assistant as released, whole or not at all.

    Args:
        head: the head.
        params: its weights.
        path: directory, made if needed.
        dtype: dtype on disk, None to keep the weights'.

    Raises:
        CheckpointError: the order of tokens in clusters is none.
    """
    if params.clusters is not None:
        _check_ordering(params.clusters.ordering, str(path))
    save_head(head.specs(), params, write_config(head), path, dtype)


def read_head(
    config: Mapping[str, Any], shapes: Shapes, info: TargetInfo, where: str = "the head"
) -> Gemma4MtpHead:
    """Build a head from a released configuration.

    Args:
        config: `config.json`.
        shapes: shape of each stored tensor; nothing depends on them here.
        info: facts of the target.
        where: names the head in messages.

    Raises:
        PairingError: the head cannot serve this target.
        CheckpointError: the configuration asks for what no reader here understands.
    """
    del shapes
    if not recognises(config):
        raise CheckpointError(
            f"{where}: architectures {config.get('architectures')} is not a Gemma 4 assistant"
        )
    width, text = required(config, "backbone_hidden_size", "text_config")
    (vocab,) = required(text, "vocab_size")
    check_sizes(width, vocab, info, where)
    for part in (config, text):
        if part.get("tie_word_embeddings", True) is not True:
            raise CheckpointError(f"{where}: tie_word_embeddings must be true in an assistant")
    if text.get("final_logit_softcapping") is not None:
        raise CheckpointError(f"{where}: final_logit_softcapping must be null in an assistant")
    layers = read_layers(text)
    for i, layer in enumerate(layers):
        if not layer.attention.shared or layer.sparse or layer.inputs:
            raise CheckpointError(
                f"{where}: layer {i} of an assistant has no keys of its own"
                " (num_kv_shared_layers is all), no experts and no inputs of its own"
            )
    last = last_key_layers(info)
    paired = [_pair(layer, last, info, where) for layer in layers]
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        named = set(config.get("architectures") or ())
        kind = next(k for k, name in _ARCHITECTURES.items() if name in named)
    return Gemma4MtpHead.asking(
        info,
        paired,
        _settings(config, where),
        model_type=kind,
        max_context=text.get("max_position_embeddings") or 0,
    )


def _settings(config: Mapping[str, Any], where: str) -> Gemma4MtpConfig:
    position = config.get(_POSITION, Gemma4MtpConfig.position)
    if position not in get_args(Position):
        raise CheckpointError(
            f"{where}: {_POSITION} {position!r}; have {', '.join(get_args(Position))}"
        )
    if not config.get("use_ordered_embeddings"):
        return Gemma4MtpConfig(position=position)
    count, top_k = required(config, "num_centroids", "centroid_intermediate_top_k")
    if not 0 < top_k <= count:
        raise CheckpointError(
            f"{where}: centroid_intermediate_top_k {top_k} must be in 1..{count} (num_centroids)"
        )
    return Gemma4MtpConfig(centroids=count, centroid_top_k=top_k, position=position)


def _pair(
    layer: Gemma4Layer, last: Mapping[str, tuple[int, KeyLayer]], info: TargetInfo, where: str
) -> Gemma4Layer:
    """Return a layer as it asks the target's keys; refuse one that expects others."""
    attention = layer.attention
    if attention.label not in last:
        raise PairingError(
            f"{where} asks keys of {attention.label} layers; this {info.family} target has none"
            " with ordinary keys of its own"
        )
    index, key = last[attention.label]
    for field, own, target in (
        ("key-value heads", attention.kv_heads, key.cache.kv_heads),
        ("dims of a key", attention.head_dim, key.cache.k_dim),
        ("dims of a value", attention.head_dim, key.cache.v_dim),
        ("keys in a window", attention.window, getattr(key.cache, "window", None)),
        ("rope", attention.rope, key.rope),
    ):
        if own != target:
            raise PairingError(
                f"{where}: its {attention.label} layers expect {field} {own}, layer {index} of the"
                f" target has {target}"
            )
    return layer


def _check_ordering(ordering: jax.Array, where: str) -> None:
    """Refuse a table in which a token is missing or stands twice."""
    ids = np.asarray(jax.device_get(ordering))
    if not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise CheckpointError(
            f"{where}: {_TABLE} must hold each of the {len(ids)} tokens once (it is no permutation)"
        )


def write_config(head: Gemma4MtpHead) -> dict[str, Any]:
    """Return the `config.json` of a head."""
    config = head.config
    said = {} if config.position == Gemma4MtpConfig.position else {_POSITION: config.position}
    return {
        "architectures": [_ARCHITECTURES[head.model_type]],
        "model_type": head.model_type,
        "backbone_hidden_size": head.target_hidden,
        "use_ordered_embeddings": bool(config.centroids),
        "num_centroids": config.centroids or _CENTROIDS,
        "centroid_intermediate_top_k": config.centroid_top_k if config.centroids else _TOP_K,
        "tie_word_embeddings": True,
        "text_config": _text(head),
        **said,
    }


def _text(head: Gemma4MtpHead) -> dict[str, Any]:
    """Return the fields of the layers."""
    by_kind = {layer.label: layer.attention for layer in head.layers}
    full = by_kind["full"]
    sliding = by_kind.get("sliding", full)
    fewer = full.value_is_key or full.kv_heads != sliding.kv_heads
    return {
        "model_type": head.model_type.replace("_assistant", "_text"),
        "hidden_size": head.hidden,
        "num_hidden_layers": len(head.layers),
        "num_attention_heads": full.heads,
        "num_key_value_heads": sliding.kv_heads,
        "head_dim": sliding.head_dim,
        # Releases write the full layers' heads where these share keys and values, else null.
        "num_global_key_value_heads": full.kv_heads if fewer else None,
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": fewer,
        "attention_bias": full.bias,
        "intermediate_size": head.layers[0].mlp,
        "hidden_activation": "gelu_pytorch_tanh",
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "num_kv_shared_layers": len(head.layers),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "sliding_window": sliding.window or _WINDOW,
        "max_position_embeddings": head.max_context,
        "rms_norm_eps": head.eps,
        "final_logit_softcapping": None,
        "rope_parameters": {f"{name}_attention": _rope(a) for name, a in by_kind.items()},
        "layer_types": [f"{layer.label}_attention" for layer in head.layers],
        "vocab_size": head.vocab,
        "tie_word_embeddings": True,
    }


def _rope(attention: Gemma4Attention) -> dict[str, Any]:
    """Return `rope_parameters` of one kind of layers."""
    rope: RopeConfig = attention.rope
    fields: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    fields |= dict(rope.scaling)
    if rope.kind == "proportional" and fields["factor"] == 1:  # releases leave it out
        del fields["factor"]
    if rope.dims != attention.head_dim:
        fields["partial_rotary_factor"] = rope.dims / attention.head_dim
    return fields
