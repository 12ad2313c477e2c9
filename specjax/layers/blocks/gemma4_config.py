"""What Gemma 4's layers are, read from the text part of a published `config.json`.

Targets and their assistants write it alike. Sizes of full layers stand in `per_layer_config`, or in
`global_head_dim` and `num_global_key_value_heads` as in the releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import CheckpointError
from specjax.core.published import required
from specjax.layers.blocks.gemma4 import Gemma4Attention, Gemma4Layer
from specjax.layers.blocks.gemma4_moe import SparseBranch
from specjax.layers.rope import RopeConfig
from specjax.layers.router import RouterConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Sizes that `per_layer_config` may change for a layer; others would be read past.
_PER_LAYER = ("head_dim", "num_key_value_heads")


def read_layers(config: Mapping[str, Any]) -> tuple[Gemma4Layer, ...]:
    """Return one description per layer; the last `num_kv_shared_layers` have no keys of their own.

    Raises:
        CheckpointError: a field is missing, or asks for something these layers do not do.
    """
    if (act := config.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise CheckpointError(
            f"config.json: hidden_activation {act!r}; Gemma 4 has 'gelu_pytorch_tanh'"
        )
    # "vision" is about image tokens alone.
    if (both := config.get("use_bidirectional_attention")) not in (None, "vision"):
        raise CheckpointError(
            f"config.json: use_bidirectional_attention {both!r} is not supported; text is causal"
        )
    types, (width,) = _layer_types(config), required(config, "intermediate_size")
    owners = len(types) - (config.get("num_kv_shared_layers") or 0)
    inputs, sparse = config.get("hidden_size_per_layer_input") or 0, _experts(config)
    layers = []
    for i, kind in enumerate(types):
        attention = _attention(config, i, kind, shared=i >= owners)
        double = attention.shared and config.get("use_double_wide_mlp")
        layers.append(Gemma4Layer(attention, width * (2 if double else 1), inputs, sparse))
    _check_shared(layers)
    return tuple(layers)


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    types, layers = required(config, "layer_types", "num_hidden_layers")
    if unknown := sorted(set(types) - {_FULL, _SLIDING}):
        raise CheckpointError(
            f"config.json: layer type {unknown[0]!r}; Gemma 4 has {_FULL!r} and {_SLIDING!r}"
        )
    if len(types) != layers:
        raise CheckpointError(f"config.json: {len(types)} layer_types for {layers} layers")
    if list(types[-1:]) != [_FULL]:  # transformers would make it a full one, whatever is written
        raise CheckpointError(f"config.json: the last of layer_types must be {_FULL!r}")
    return types


def _attention(
    config: Mapping[str, Any], index: int, kind: str, *, shared: bool
) -> Gemma4Attention:
    """Read one attention layer."""
    hidden, heads, ropes = required(config, "hidden_size", "num_attention_heads", "rope_parameters")
    head_dim, kv_heads = _sizes(config, index, kind)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: {heads} heads of layer {index} do not divide over {kv_heads}"
            " key-value heads"
        )
    if not isinstance(ropes.get(kind), Mapping):
        raise CheckpointError(f"config.json: rope_parameters lack {kind!r}")
    return Gemma4Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=RopeConfig.from_hf(config, head_dim, layer_type=kind),
        window=None if kind == _FULL else required(config, "sliding_window")[0],
        shared=shared,
        value_is_key=kind == _FULL and bool(config.get("attention_k_eq_v")),
        bias=bool(config.get("attention_bias")),
    )


def _sizes(config: Mapping[str, Any], index: int, kind: str) -> tuple[int, int]:
    """Return (size of a head, key-value heads) of a layer, whichever way they are written."""
    head_dim, kv_heads = required(config, *_PER_LAYER)
    overrides = config.get("per_layer_config")
    if overrides is not None:
        own = {str(layer): sizes for layer, sizes in overrides.items()}.get(str(index), {})
        if unknown := sorted(set(own) - set(_PER_LAYER)):
            raise CheckpointError(
                f"config.json: per_layer_config of layer {index} sets {unknown[0]};"
                f" have {', '.join(_PER_LAYER)}"
            )
        return own.get("head_dim", head_dim), own.get("num_key_value_heads", kv_heads)
    if kind == _SLIDING:
        return head_dim, kv_heads
    (head_dim,) = required(config, "global_head_dim")
    if config.get("attention_k_eq_v"):  # releases without it have the field too; it means nothing
        kv_heads = config.get("num_global_key_value_heads") or kv_heads
    return head_dim, kv_heads


def _check_shared(kinds: list[Gemma4Layer]) -> None:
    """Refuse layers that would read keys of other sizes than they ask for."""
    source: dict[str, Gemma4Attention] = {}
    for i, attention in enumerate(kind.attention for kind in kinds):
        if not attention.shared:
            source[attention.label] = attention
        elif attention.label in source and source[attention.label].keys != attention.keys:
            raise CheckpointError(
                f"config.json: layer {i} shares keys and values of other sizes than its own"
            )


def _experts(config: Mapping[str, Any]) -> SparseBranch | None:
    if not config.get("enable_moe_block"):
        return None
    hidden, count, top_k, width = required(
        config, "hidden_size", "num_experts", "top_k_experts", "moe_intermediate_size"
    )
    router = RouterConfig(experts=count, top_k=top_k, score="softmax", normalise=True)
    return SparseBranch(hidden, width, router, float(config.get("rms_norm_eps", 1e-6)))
