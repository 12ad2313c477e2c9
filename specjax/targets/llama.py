"""Llama-style dense decoders (Llama 3, SmolLM2, Mistral-like layouts without windows)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.core.errors import CheckpointError
from specjax.core.params import ParamSpec
from specjax.layers.attention import KeyBlock, causal_mask
from specjax.layers.blocks.dense import BlockConfig, LayerWeights, decoder_layer, norm_spec
from specjax.layers.cache import full
from specjax.layers.embedding import lookup
from specjax.layers.linear import linear_f32
from specjax.layers.norm import rms_norm
from specjax.layers.rope import rope_tables
from specjax.targets.base import Cache, Family, TargetInfo, TargetOut

PyTree = Any


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A dense decoder: how many equal blocks, and what stands around them."""

    model_type: str
    block: BlockConfig
    layers: int
    vocab: int
    tied: bool
    stop_ids: tuple[int, ...]
    max_context: int


@struct.dataclass
class DenseWeights:
    """Weights of a dense decoder; `output` is None where it is tied to the embedding."""

    embedding: Any
    layers: tuple[LayerWeights, ...]
    norm: Any
    output: Any

    @classmethod
    def abstract(cls, config: DenseConfig) -> DenseWeights:
        """Return the weight table with the published names."""
        vocab = (config.vocab, config.block.hidden), ("vocab", "embed")
        return cls(
            embedding=ParamSpec(*vocab, "model.embed_tokens.weight"),
            layers=tuple(
                LayerWeights.abstract(config.block, f"model.layers.{i}.")
                for i in range(config.layers)
            ),
            norm=norm_spec(config.block.hidden, "model.norm.weight"),
            output=None if config.tied else ParamSpec(*vocab, "lm_head.weight"),
        )


def read_dense(config: Mapping[str, Any], *, qk_norm: bool) -> DenseConfig:
    """Read a published dense configuration; missing fields are named in a CheckpointError."""
    missing = [name for name in ("num_hidden_layers", "vocab_size") if config.get(name) is None]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    stops = config.get("eos_token_id")
    stops = () if stops is None else (stops,) if isinstance(stops, int) else tuple(stops)
    return DenseConfig(
        model_type=config["model_type"],
        block=BlockConfig.from_hf(config, qk_norm=qk_norm),
        layers=config["num_hidden_layers"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        stop_ids=stops,
        max_context=config.get("max_position_embeddings", 2048),
    )


def read_config(config: Mapping[str, Any]) -> DenseConfig:
    """Read a Llama `config.json`."""
    return read_dense(config, qk_norm=False)


def info(config: DenseConfig) -> TargetInfo:
    """Return the static facts of a dense decoder."""
    return TargetInfo(
        family=config.model_type,
        hidden=config.block.hidden,
        vocab=config.vocab,
        num_layers=config.layers,
        layer_kinds=("full",) * config.layers,
        stop_ids=config.stop_ids,
        max_context=config.max_context,
    )


def init_cache(
    config: DenseConfig, batch: int, capacity: int, dtype: str
) -> tuple[full.FullCache, ...]:
    """Return one empty full cache per layer."""
    b = config.block
    return tuple(
        full.empty(batch, b.kv_heads, capacity, b.head_dim, b.head_dim, dtype)
        for _ in range(config.layers)
    )


def forward(
    params: DenseWeights,
    config: DenseConfig,
    tokens: jax.Array,
    valid: jax.Array,
    cache: Cache | None,
    taps: tuple[int, ...],
) -> TargetOut:
    """Run the layers over T new positions (see `Target.forward`)."""
    del valid  # pads are on the right, so the causal mask already hides them from real tokens
    batch, length = tokens.shape
    start = jnp.zeros((batch,), jnp.int32) if cache is None else cache.lengths
    cos, sin = rope_tables(config.block.rope, start[:, None] + jnp.arange(length)[None])
    new_mask = causal_mask(length)
    x = embed(params, config, tokens)
    streams, update = [x], []
    for i, weights in enumerate(params.layers):
        cached = []
        if cache is not None:
            entry = cache.layers[i]
            cached = [KeyBlock(entry.k, entry.v, full.visible(entry, cache.lengths))]
        x, new = decoder_layer(weights, config.block, x, cos, sin, cached, new_mask)
        streams.append(x)
        update.append(new)
    kept = [streams[tap] for tap in taps]
    return TargetOut(
        hidden=rms_norm(x, params.norm, config.block.eps),
        taps=jnp.stack(kept) if kept else jnp.zeros((0, *x.shape), x.dtype),
        update=tuple(update),
    )


def commit(
    layers: tuple[full.FullCache, ...], lengths: jax.Array, update: tuple[Any, ...], n: jax.Array
) -> tuple[full.FullCache, ...]:
    """Append the first n positions of each layer's new keys and values."""
    pairs = zip(layers, update, strict=True)
    return tuple(full.write(entry, lengths, k, v, n) for entry, (k, v) in pairs)


def embed(params: DenseWeights, config: DenseConfig, tokens: jax.Array) -> jax.Array:
    """Look up embeddings, unscaled."""
    del config
    return lookup(params.embedding, tokens)


def output_weights(params: DenseWeights, config: DenseConfig) -> jax.Array:
    """Return the output matrix `[V, H]`."""
    return params.embedding if config.tied else params.output


def logits(params: DenseWeights, config: DenseConfig, hidden: jax.Array) -> jax.Array:
    """Return float32 logits of normed states."""
    return linear_f32(hidden, output_weights(params, config))


FAMILY = Family(
    read_config=read_config,
    info=info,
    specs=DenseWeights.abstract,
    init_cache=init_cache,
    forward=forward,
    commit=commit,
    logits=logits,
    embed=embed,
    output_weights=output_weights,
    ignored=("*.rotary_emb.inv_freq",),
)
