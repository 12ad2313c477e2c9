"""What the layouts of released heads share: sizes, layers, draft vocabularies, and saving."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.core.errors import CheckpointError, PairingError
from specjax.core.params import ParamSpec, map_specs
from specjax.io.hf import save_checkpoint
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.blocks.gemma4 import Gemma4Layer
from specjax.layers.blocks.gemma4_config import read_layers
from specjax.layers.blocks.geometry import Gemma4Geometry, Geometry, PlainGeometry
from specjax.layers.rope import RopeConfig
from specjax.targets.base import TargetInfo

PyTree = Any
Shapes = Mapping[str, tuple[int, ...]]
_SWITCHES = ("layer_types", "use_sliding_window")


def check_sizes(hidden: int, vocab: int | None, info: TargetInfo, where: str) -> None:
    """Refuse a head for another vocabulary or another width than the target's.

    Raises:
        PairingError: naming both numbers.
    """
    if vocab != info.vocab:
        raise PairingError(
            f"{where} is for a vocabulary of {vocab} tokens, the target has {info.vocab}"
        )
    if hidden != info.hidden:
        raise PairingError(f"{where} is for a target of width {hidden}, this one is {info.hidden}")


def save_head(
    specs: PyTree, params: PyTree, config: Mapping[str, Any], path: str | Path, dtype: str | None
) -> None:
    """Write a head, whole or not at all; tables of ids as int64, as all layouts have them."""

    def on_disk(spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(spec, dtype="int64") if spec.dtype == "int32" else spec

    save_checkpoint(map_specs(on_disk, specs), params, config, path, dtype)


def read_geometry(body: Mapping[str, Any], shapes: Shapes, prefix: str, where: str) -> Geometry:
    """Read what a head's layers are; windows are the caller's to read.

    Args:
        body: fields of the layers, as in a target's `config.json`.
        shapes: shape of each stored tensor.
        prefix: of the first layer's tensors.
        where: names the head in messages.

    Raises:
        CheckpointError: a field is missing, or asks for what these layers do not do.
    """
    if str(body.get("model_type", "")).startswith("gemma"):
        return _read_gemma4(body, where)
    name = f"{prefix}self_attn.q_proj.weight"
    heads = body.get("num_attention_heads")
    body = {key: value for key, value in body.items() if key not in _SWITCHES}
    if not body.get("head_dim") and heads and name in shapes:  # not guessed from the width
        body["head_dim"] = shapes[name][0] // heads
    qk_norm = f"{prefix}self_attn.q_norm.weight" in shapes
    return PlainGeometry(BlockConfig.from_hf(body, qk_norm=qk_norm))


def _read_gemma4(body: Mapping[str, Any], where: str) -> Gemma4Geometry:
    layers = read_layers(body)
    layer = layers[0]
    alike = len(set(layers)) == 1 and not (layer.sparse or layer.inputs or layer.attention.shared)
    if not alike or layer.attention.window is not None:
        raise CheckpointError(
            f"{where}: Gemma 4 layers of a head are full-attention ones, all alike, without"
            " experts, inputs of their own or shared keys"
        )
    return Gemma4Geometry(layer)


def write_geometry(geometry: Geometry) -> dict[str, Any]:
    """Return the fields of layers as a target's `config.json` has them, without windows."""
    if isinstance(geometry, Gemma4Geometry):
        return _write_gemma4(geometry.layer)
    block = geometry.block
    fields: dict[str, Any] = {
        "model_type": "qwen3" if block.qk_norm else "llama",
        "hidden_size": block.hidden,
        "intermediate_size": block.mlp,
        "num_attention_heads": block.heads,
        "num_key_value_heads": block.kv_heads,
        "head_dim": block.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": block.eps,
        "attention_bias": block.attention_bias,
        "mlp_bias": block.mlp_bias,
        "rope_parameters": rope_fields(block.rope),
    }
    if block.rope.dims != block.head_dim:
        fields["partial_rotary_factor"] = block.rope.dims / block.head_dim
    return fields


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """Return `rope_parameters` of one kind of layers."""
    return {"rope_theta": rope.theta, "rope_type": rope.kind, **dict(rope.scaling)}


def _write_gemma4(layer: Gemma4Layer) -> dict[str, Any]:
    attention = layer.attention
    return {
        "model_type": "gemma4_text",
        "hidden_size": attention.hidden,
        "intermediate_size": layer.mlp,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "num_global_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "global_head_dim": attention.head_dim,
        "attention_k_eq_v": attention.value_is_key,
        "attention_bias": attention.bias,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": attention.eps,
        "rope_parameters": {"full_attention": rope_fields(attention.rope)},
    }


def read_vocabulary(
    config: Mapping[str, Any], shapes: Shapes, vocab: int, where: str
) -> tuple[int, bool]:
    """Return (size of the draft vocabulary, whether it has maps).

    Raises:
        PairingError: a part of the vocabulary, and nothing says which.
    """
    mapped = "d2t" in shapes
    stored = shapes["d2t"][0] if mapped else shapes.get("lm_head.weight", (vocab,))[0]
    size = config.get("draft_vocab_size") or stored
    if size != vocab and not mapped:
        raise PairingError(
            f"{where} drafts {size} of {vocab} tokens but stores no d2t: which ones is unknown"
        )
    return size, mapped or "t2d" in shapes


def read_layer_types(body: Mapping[str, Any], layers: int, where: str) -> tuple[str, ...]:
    """Return "full" or "sliding" for each layer.

    Without `layer_types`, `use_sliding_window` makes the layers from `max_window_layers` on
    sliding, as transformers has it.

    Raises:
        CheckpointError: other kinds of layers, or not one kind for each.
    """
    types: Sequence[str] | None = body.get("layer_types")
    if types is None:
        full = body.get("max_window_layers", layers) if body.get("use_sliding_window") else layers
        return tuple("full" if i < full else "sliding" for i in range(layers))
    words = {"full_attention": "full", "sliding_attention": "sliding"}
    if unknown := sorted(set(types) - set(words)):
        raise CheckpointError(f"{where}: layer type {unknown[0]!r}; have {', '.join(words)}")
    if len(types) != layers:
        raise CheckpointError(f"{where}: {len(types)} layer_types for {layers} layers")
    return tuple(words[kind] for kind in types)
