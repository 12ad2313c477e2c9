"""The fields of a module's layer, as a `config.json` has them: written, and held against a target.

A module of a family with an MTP layer of its own (Qwen3.5, DeepSeek) has the target's layer, so
that a file's fields are only compared with it; what the file does not state is the target's. An
ordinary block has sizes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import PairingError
from specjax.heads.released import Shapes, read_geometry, rope_fields, write_geometry
from specjax.layers.blocks.deepseek import DeepseekLayer
from specjax.layers.blocks.dense import BlockConfig, DenseLayer
from specjax.layers.blocks.geometry import PlainGeometry
from specjax.layers.blocks.qwen3_5 import GatedAttentionLayer
from specjax.layers.blocks.sparse import SparseConfig
from specjax.layers.layer_kind import LayerKind
from specjax.layers.rope import RopeConfig
from specjax.targets.base import TargetInfo

_PLAIN = ("llama", "qwen3")
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
_PARTIAL = ("partial_rotary_factor", "rotary_dim")


def write_layer(layer: LayerKind, family: str) -> dict[str, Any]:
    """Return the fields of a layer.

    Args:
        layer: what a module's layer is.
        family: `model_type` of a target that has such a layer.

    Raises:
        PairingError: there are no fields for such a layer.
    """
    if isinstance(layer, DenseLayer):
        return {**write_geometry(PlainGeometry(layer.block)), **_partial(layer.block)}
    if isinstance(layer, GatedAttentionLayer):
        block = layer.mixer
        return {
            "model_type": family,
            **_attention(block),
            **_partial(block),
            "attn_output_gate": True,
            **_qwen_feed_forward(layer.feed_forward),
        }
    if isinstance(layer, DeepseekLayer):
        return {"model_type": family, **_deepseek(layer)}
    raise PairingError(f"a file of MTP modules has no fields for a layer {type(layer).__name__}")


def _attention(block: BlockConfig) -> dict[str, Any]:
    return {
        "hidden_size": block.hidden,
        "num_attention_heads": block.heads,
        "num_key_value_heads": block.kv_heads,
        "head_dim": block.head_dim,
        "rms_norm_eps": block.eps,
        "attention_bias": block.attention_bias,
        "rope_parameters": rope_fields(block.rope),
    }


def _partial(block: BlockConfig) -> dict[str, float]:
    """Return the share of a head that turns; stated also where it is all of it (F10)."""
    return {"partial_rotary_factor": block.rope.dims / block.head_dim}


def _qwen_feed_forward(feed_forward: int | SparseConfig) -> dict[str, int]:
    if isinstance(feed_forward, int):
        return {"intermediate_size": feed_forward}
    return {
        "num_experts": feed_forward.router.experts,
        "num_experts_per_tok": feed_forward.router.top_k,
        "moe_intermediate_size": feed_forward.width,
        "shared_expert_intermediate_size": feed_forward.shared,
    }


def _deepseek(layer: DeepseekLayer) -> dict[str, Any]:
    attention, sparse = layer.attention, layer.feed_forward
    fields: dict[str, Any] = {
        "hidden_size": attention.hidden,
        "num_attention_heads": attention.heads,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope.dims,
        "v_head_dim": attention.v_dim,
        "rms_norm_eps": attention.eps,
        "attention_bias": attention.attention_bias,
        "rope_interleave": attention.interleaved,
        "rope_parameters": rope_fields(attention.rope),
    }
    if isinstance(sparse, int):
        return {**fields, "intermediate_size": sparse}
    return {
        **fields,
        "n_routed_experts": sparse.router.experts,
        "num_experts_per_tok": sparse.router.top_k,
        "moe_intermediate_size": sparse.width,
        "n_shared_experts": sparse.shared // sparse.width,
        "n_group": sparse.router.groups,
        "topk_group": sparse.router.top_groups,
        "norm_topk_prob": sparse.router.normalise,
        "routed_scaling_factor": sparse.router.scaling,
    }


def read_layer(body: Mapping[str, Any], shapes: Shapes, info: TargetInfo, where: str) -> LayerKind:
    """Read what the layer of a file's modules is.

    Args:
        body: its `transformer_layer_config`.
        shapes: shape of each stored tensor.
        info: facts of the target.
        where: names the head in messages.

    Raises:
        PairingError: a layer that no module of this target has, the field named.
        CheckpointError: an ordinary block's field is missing, or asks for what it does not do.
    """
    kind = str(body.get("model_type"))
    if kind in _PLAIN:
        block = info.draft_block
        geometry = read_geometry(
            body if block is None else _with_rope(body, block), shapes, "mtp_layers.0.", where
        )
        assert isinstance(geometry, PlainGeometry)  # no Gemma layers among _PLAIN
        return DenseLayer(geometry.block)
    if info.draft_layer is None or kind != info.family:
        own = f"{info.family}, " if info.draft_layer is not None else ""
        raise PairingError(
            f"{where}: its layers are of a {kind} target, this one takes {own}{' or '.join(_PLAIN)}"
        )
    for name, value in write_layer(info.draft_layer, info.family).items():
        given = body.get(name)
        if name not in (*_ROPE, *_PARTIAL) and given is not None and given != value:
            raise PairingError(
                f"{where}: {name} is {given}, the MTP layer of this target has {value}"
            )
    _check_rope(body, info.draft_layer, where)
    return info.draft_layer


def _stated(body: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether a field is there, on its own or among the rope's."""
    rope = body.get("rope_parameters") or body.get("rope_scaling") or {}
    return any(source.get(name) is not None for source in (body, rope) for name in names)


def _with_rope(body: Mapping[str, Any], block: BlockConfig) -> dict[str, Any]:
    """Complete what a file does not say of its rope by the target's, for heads of its size."""
    whole = dict(body)
    if not _stated(body, _ROPE):
        whole["rope_parameters"] = rope_fields(block.rope)
    if not _stated(body, _PARTIAL) and body.get("head_dim", block.head_dim) == block.head_dim:
        whole |= _partial(block)
    return whole


def _check_rope(body: Mapping[str, Any], layer: LayerKind, where: str) -> None:
    """Refuse a rope other than the target's, as far as one is stated."""
    if not _stated(body, (*_ROPE, *_PARTIAL)):
        return
    ours: RopeConfig = layer.ropes[0]
    whole, size = dict(body), ours.dims
    if not _stated(body, _ROPE):
        whole["rope_parameters"] = rope_fields(ours)
    if isinstance(layer, GatedAttentionLayer):
        size = layer.mixer.head_dim
        if not _stated(body, _PARTIAL):
            whole |= _partial(layer.mixer)
    theirs = RopeConfig.from_hf(whole, size)
    if theirs != ours:
        raise PairingError(f"{where}: its rope is {theirs}, that of this target's MTP layer {ours}")
