"""The decoder that all families share: embedding, layers in a loop, norm, output layer.

A family says what each of its layers is (`LayerKind`, a frozen description with a weight table and
a layer function) and what stands around them (`DecoderConfig`). Here the layers are run, unrolled
or scanned over their repeating pattern, and their caches are made and written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.core.errors import CheckpointError
from specjax.core.params import ParamSpec
from specjax.core.published import required
from specjax.core.sharding import Layout
from specjax.core.stack import Segment, group, map_entries, pick, segments
from specjax.layers.attention import attend_with
from specjax.layers.blocks.dense import BlockConfig, norm_spec
from specjax.layers.cache.full import FullKind
from specjax.layers.cache.window import WindowKind
from specjax.layers.context import Context
from specjax.layers.documents import Documents
from specjax.layers.embedding import lookup
from specjax.layers.layer_kind import LayerKind
from specjax.layers.linear import capped, linear_f32
from specjax.layers.norm import offset_norm, rms_norm
from specjax.layers.packing import Packing, pack
from specjax.targets.base import Cache, Family, KeyLayer, TargetInfo, TargetOut
from specjax.targets.layer_loop import run_layers

PyTree = Any


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder: its layers, and what stands around them.

    Attributes:
        model_type: of the text model, as published.
        hidden: width H of the residual stream.
        vocab: size V of the vocabulary.
        eps: of the last norm.
        kinds: one description per layer.
        tied: the output layer is the embedding.
        stop_ids: tokens that end a text.
        max_context: longest context.
        embed_scale: factor on embeddings, rounded to their dtype.
        softcap: logits are `cap * tanh(logits / cap)`; None leaves them.
        norm_offset: norm weights are stored as an offset from 1.
        extra: what a family needs besides, e.g. per-layer inputs: a frozen description with
            `abstract()` and `run(weights, tokens, x, layout)`, whose result is `Context.extra`.
        draft_block: the shape that a draft head's ordinary decoder blocks copy.
        draft_layer: the layer of its MTP modules, where these are not ordinary blocks.
        draft_modules: MTP modules that the checkpoint holds besides.
        layer_loop: "unroll" or "scan".
        attention: back end, "blocks" or "dot_product".
    """

    model_type: str
    hidden: int
    vocab: int
    eps: float
    kinds: tuple[LayerKind, ...]
    tied: bool
    stop_ids: tuple[int, ...]
    max_context: int
    embed_scale: float = 1.0
    softcap: float | None = None
    norm_offset: bool = False
    extra: Any = None
    draft_block: BlockConfig | None = None
    draft_layer: LayerKind | None = None
    draft_modules: int = 0
    layer_loop: str = "unroll"
    attention: str = "blocks"

    def __post_init__(self) -> None:
        """Refuse layers that read keys and values that nobody has."""
        owned: set[str] = set()
        for i, kind in enumerate(self.kinds):
            if kind.cache is not None:
                owned.add(kind.label)
            elif kind.label not in owned:
                raise CheckpointError(
                    f"config.json: layer {i} shares keys and values, but no {kind.label} layer"
                    " before it has any"
                )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers as runs that repeat."""
        return segments(self.kinds, self.layer_loop)


@struct.dataclass
class DecoderWeights:
    """Weights of a decoder.

    Attributes:
        embedding: `[V, H]`.
        layers: one tree per layer, or per position of a repeating pattern (`core.stack`).
        norm: `[H]`.
        output: `[V, H]`, None where it is the embedding.
        extra: what a family needs besides.
    """

    embedding: Any
    layers: tuple[PyTree, ...]
    norm: Any
    output: Any
    extra: Any = None


def around(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what every family publishes alike, as arguments of DecoderConfig."""
    hidden, vocab = required(config, "hidden_size", "vocab_size")
    stops = config.get("eos_token_id")
    stops = () if stops is None else (stops,) if isinstance(stops, int) else tuple(stops)
    return {
        "model_type": config["model_type"],
        "hidden": hidden,
        "vocab": vocab,
        "eps": float(config.get("rms_norm_eps", 1e-6)),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "stop_ids": stops,
        "max_context": config.get("max_position_embeddings", 2048),
    }


def specs(config: DecoderConfig) -> DecoderWeights:
    """Return the weight table with the published names."""
    table = (config.vocab, config.hidden), ("vocab", "embed")
    layers = [kind.abstract(f"model.layers.{i}.") for i, kind in enumerate(config.kinds)]
    return DecoderWeights(
        embedding=ParamSpec(*table, "model.embed_tokens.weight"),
        layers=group(layers, config.segments),
        norm=norm_spec(config.hidden, "model.norm.weight"),
        output=None if config.tied else ParamSpec(*table, "lm_head.weight"),
        extra=None if config.extra is None else config.extra.abstract(),
    )


def info(config: DecoderConfig) -> TargetInfo:
    """Return the static facts of a decoder."""
    return TargetInfo(
        family=config.model_type,
        hidden=config.hidden,
        vocab=config.vocab,
        num_layers=len(config.kinds),
        layer_kinds=tuple("shared" if k.cache is None else k.cache.name for k in config.kinds),
        stop_ids=config.stop_ids,
        max_context=config.max_context,
        draft_block=config.draft_block,
        draft_layer=config.draft_layer,
        draft_modules=config.draft_modules,
        eps=config.eps,
        norm_offset=config.norm_offset,
        embed_scale=config.embed_scale,
        softcap=config.softcap,
        key_layers=tuple(_keys_of(kind) for kind in config.kinds),
    )


def _keys_of(kind: LayerKind) -> KeyLayer | None:
    """Return what heads can read of a layer: keys of its own, of ordinary attention."""
    readable = isinstance(kind.cache, FullKind | WindowKind)
    return KeyLayer(kind.cache, kind.ropes[0]) if readable and kind.ropes else None


def init_cache(config: DecoderConfig, batch: int, capacity: int, dtype: str) -> tuple[PyTree, ...]:
    """Return one empty entry per layer, None for a layer that keeps nothing."""
    entries = [
        None if kind.cache is None else kind.cache.empty(batch, capacity, dtype)
        for kind in config.kinds
    ]
    return group(entries, config.segments)


def forward(
    params: DecoderWeights,
    config: DecoderConfig,
    tokens: jax.Array,
    valid: jax.Array,
    cache: Cache | None,
    taps: tuple[int, ...],
    packing: Packing | None = None,
    documents: Documents | None = None,
    layout: Layout | None = None,
) -> TargetOut:
    """Run the layers over T new positions (see `Target.forward`)."""
    batch, length = tokens.shape
    start = jnp.zeros((batch,), jnp.int32) if cache is None else cache.lengths
    ropes = [rope for kind in config.kinds for rope in kind.ropes]
    attend = attend_with(config.attention)
    ctx = Context.of(start, valid, length, ropes, attend, packing, documents, layout)
    tokens = pack(packing, tokens)
    x = embed(params, config, tokens)
    if config.extra is not None:
        ctx = dataclasses.replace(ctx, extra=config.extra.run(params.extra, tokens, x, layout))
    entries = (None,) * len(params.layers) if cache is None else cache.layers
    x, streams, update = run_layers(
        config.kinds, config.segments, params.layers, entries, x, ctx, taps
    )
    hidden = (
        offset_norm(x, params.norm, config.eps)
        if config.norm_offset
        else rms_norm(x, params.norm, config.eps)
    )
    return TargetOut(hidden=hidden, taps=streams, update=update)


def commit(
    config: DecoderConfig,
    layers: tuple[PyTree, ...],
    lengths: jax.Array,
    update: tuple[PyTree, ...],
    n: jax.Array,
) -> tuple[PyTree, ...]:
    """Append the first n positions of each layer's update."""
    kinds = [config.kinds[part.first + p] for part in config.segments for p in range(part.period)]

    def write(kind: LayerKind, entry: PyTree, new: PyTree) -> PyTree:
        if kind.cache is None:
            return None
        cache = kind.cache
        return map_entries(lambda e, u: cache.write(e, lengths, u, n), entry, new)

    return tuple(write(*layer) for layer in zip(kinds, layers, update, strict=True))


def entry(config: DecoderConfig, layers: tuple[PyTree, ...], index: int) -> PyTree:
    """Return what a cache or an update holds of one layer."""
    return pick(layers, config.segments, index)


def embed(params: DecoderWeights, config: DecoderConfig, tokens: jax.Array) -> jax.Array:
    """Look up embeddings, scaled as the family does."""
    rows = lookup(params.embedding, tokens)
    return rows if config.embed_scale == 1.0 else rows * jnp.asarray(config.embed_scale, rows.dtype)


def output_weights(params: DecoderWeights, config: DecoderConfig) -> jax.Array:
    """Return the output matrix `[V, H]`."""
    return params.embedding if config.tied else params.output


def logits(params: DecoderWeights, config: DecoderConfig, hidden: jax.Array) -> jax.Array:
    """Return float32 logits of normed states."""
    return capped(linear_f32(hidden, output_weights(params, config)), config.softcap)


def family(
    read_config: Callable[[Mapping[str, Any]], DecoderConfig],
    ignored: Callable[[DecoderConfig], tuple[str, ...]] | None = None,
) -> Family:
    """Return the family whose configurations `read_config` reads.

    Args:
        read_config: published text configuration to DecoderConfig.
        ignored: configuration to shell patterns of tensors that no layer uses.
    """
    return Family(
        read_config=read_config,
        info=info,
        specs=specs,
        init_cache=init_cache,
        forward=forward,
        commit=commit,
        logits=logits,
        embed=embed,
        output_weights=output_weights,
        entry=entry,
        ignored=functools.partial(_ignored, ignored),
    )


def _ignored(
    more: Callable[[DecoderConfig], tuple[str, ...]] | None, config: DecoderConfig
) -> tuple[str, ...]:
    # Some tied checkpoints carry a copy of the embedding.
    copies = ("lm_head.weight",) if config.tied else ()
    return ("*.rotary_emb.inv_freq", *copies, *(more(config) if more else ()))
