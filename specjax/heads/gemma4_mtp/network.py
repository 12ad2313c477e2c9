"""One step of the assistant: what drafting and training compute alike.

    x = pre_projection [E_target[token] * scale ; state]
    x = layers(x)               Gemma 4 layers that ask the target's keys and have none of their own
    y = norm(x)
    logits = E_own y,  next state = post_projection y

The state starts as the target's last one, after the target's final norm. Position and visible keys
belong to the round, not to the step: all steps of a round stand at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.params import ParamSpec
from specjax.heads.base import Borrowed
from specjax.heads.gemma4_mtp.centroids import CentroidWeights, clustered_logits
from specjax.layers.attention import KeyBlock, attend
from specjax.layers.blocks.dense import norm_spec
from specjax.layers.blocks.gemma4 import Gemma4Weights, finish, mix, project_queries
from specjax.layers.embedding import lookup
from specjax.layers.linear import linear, linear_f32
from specjax.layers.norm import rms_norm
from specjax.layers.rope import RopeConfig, rope_tables

if TYPE_CHECKING:
    from specjax.heads.gemma4_mtp.head import Gemma4MtpHead

Weight = Any
PyTree = Any
Tables = Mapping[RopeConfig, tuple[jax.Array, jax.Array]]


@struct.dataclass
class AssistantWeights:
    """Weights of the assistant, Ha its width and H the target's.

    Attributes:
        pre: `[Ha, 2 H]`, the token's half first.
        layers: one per layer.
        norm: `[Ha]`.
        post: `[H, Ha]`.
        embedding: `[V, Ha]` the output layer; never the target's.
        clusters: of the tokens, None where all are scored.
    """

    pre: Weight
    layers: tuple[Gemma4Weights, ...]
    norm: Weight
    post: Weight
    embedding: Weight
    clusters: CentroidWeights | None = None


def weight_specs(head: Gemma4MtpHead) -> AssistantWeights:
    """Return the weight table with the published names."""
    own, target, clusters = head.hidden, head.target_hidden, head.config.centroids
    return AssistantWeights(
        pre=ParamSpec((own, 2 * target), ("embed", None), "pre_projection.weight"),
        layers=tuple(layer.abstract(f"model.layers.{i}.") for i, layer in enumerate(head.layers)),
        norm=norm_spec(own, "model.norm.weight"),
        post=ParamSpec((target, own), (None, "embed"), "post_projection.weight"),
        embedding=ParamSpec((head.vocab, own), ("vocab", "embed"), "model.embed_tokens.weight"),
        clusters=CentroidWeights.abstract(clusters, head.vocab, own) if clusters else None,
    )


@struct.dataclass
class Stepped:
    """What a step over T queries gives.

    Attributes:
        inputs: `[B, T, 2 H]` token embedding and state.
        streams: residual streams `[B, T, Ha]`, before the first layer and after each.
        hidden: `[B, T, Ha]` after the final norm.
        state: `[B, T, H]` the next step's state.
    """

    inputs: Float[Array, "B T I"]
    streams: tuple[Float[Array, "B T A"], ...]
    hidden: Float[Array, "B T A"]
    state: Float[Array, "B T H"]


def query_positions(head: Gemma4MtpHead, processed: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """Return where the query of a round stands when the target has processed so many tokens."""
    behind = head.config.position == "draft_serving"
    return jnp.maximum(processed - 1, 0) if behind else processed


def tables_at(head: Gemma4MtpHead, positions: Int[Array, "B T"]) -> Tables:
    """Return the rope tables of queries at `positions`."""
    ropes = dict.fromkeys(layer.attention.rope for layer in head.layers)
    return {rope: rope_tables(rope, positions) for rope in ropes}


def visible_keys(
    head: Gemma4MtpHead, entries: Sequence[PyTree], processed: Int[Array, " B"], extra: int = 0
) -> tuple[KeyBlock, ...]:
    """Return what a round sees of the target's cache: per layer read, its committed keys.

    Args:
        head: which layers it reads.
        entries: their cache entries.
        processed: `[B]` committed positions.
        extra: keys that sliding layers see beyond their window, if the rings hold them (right
            after a prompt transformers shows one).
    """
    # The newest committed position itself asks: it sees the last `window` keys, its own among them.
    last = (processed - 1 - extra)[:, None]
    return tuple(
        keys.cache.read(entry, processed, last)
        for keys, entry in zip(head.keys, entries, strict=True)
    )


def step(
    head: Gemma4MtpHead,
    params: AssistantWeights,
    borrowed: Borrowed,
    tokens: Int[Array, "B T"],
    state: Float[Array, "B T H"],
    tables: Tables,
    keys: Sequence[KeyBlock],
) -> Stepped:
    """Run the network once.

    Args:
        head: what it is.
        params: its weights.
        borrowed: the target's embedding.
        tokens: newest token of each query.
        state: the target's state before it, or the last step's.
        tables: of `tables_at`.
        keys: per layer read, what the queries see of it.
    """
    kind = params.pre.dtype
    rows = lookup(borrowed.embedding, tokens)
    if head.embed_scale != 1.0:  # rounded as the target rounds it
        rows = rows * jnp.asarray(head.embed_scale, rows.dtype)
    inputs = jnp.concatenate([rows.astype(kind), state.astype(kind)], axis=-1)
    x = linear(inputs, params.pre)
    streams = [x]
    for layer, source, weights in zip(head.layers, head.sources, params.layers, strict=True):
        attention = layer.attention
        normed = rms_norm(x, weights.input_norm, attention.eps)
        q = project_queries(weights.attention, attention, normed, *tables[attention.rope])
        x = finish(weights, layer, x, mix(weights.attention, q, [keys[source]], attend))
        streams.append(x)
    y = rms_norm(x, params.norm, head.eps)
    return Stepped(inputs, tuple(streams), y, linear(y, params.post))


def draft_logits(
    head: Gemma4MtpHead, params: AssistantWeights, hidden: Float[Array, "B A"]
) -> Float[Array, "B V"]:
    """Return float32 logits of states after the final norm; -inf where nothing can be drafted."""
    if params.clusters is None:
        return linear_f32(hidden, params.embedding)
    return clustered_logits(params.clusters, params.embedding, hidden, head.config.centroid_top_k)
