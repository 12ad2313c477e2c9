"""What every target is: static facts, a weight table, and five pure functions.

`forward` reads the cache and returns an update; `commit` is the only writer (DESIGN section 2 of
the project's notes, README "How decoding works"). Static parts are tuples and module-level
functions, equal by value, so that a target loaded twice compiles once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.sharding import Layout
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.cache.full import FullKind
from specjax.layers.cache.window import WindowKind
from specjax.layers.documents import Documents
from specjax.layers.layer_kind import LayerKind
from specjax.layers.packing import Packing
from specjax.layers.rope import RopeConfig

PyTree = Any


@dataclasses.dataclass(frozen=True)
class KeyLayer:
    """A layer whose keys and values a head can read: ordinary attention with keys of its own.

    Attributes:
        cache: what the layer keeps; its `read` gives the keys that queries see.
        rope: how positions turn its keys.
    """

    cache: FullKind | WindowKind
    rope: RopeConfig


@dataclasses.dataclass(frozen=True)
class TargetInfo:
    """Static facts of a target that heads, engine and planner may ask for.

    Attributes:
        family: the `model_type` it was built from.
        hidden: width H of the residual stream.
        vocab: size V of the vocabulary.
        num_layers: number L of decoder layers.
        layer_kinds: kind of each layer's cache: "full", "window", "latent", "recurrent", or
            "shared" for a layer that reads another's.
        stop_ids: tokens that end a text.
        max_context: longest context the configuration allows.
        draft_block: the shape that a draft head's ordinary decoder blocks copy.
        draft_layer: the layer that an MTP module of this target has; None takes `draft_block`.
        draft_modules: MTP modules that the target's own checkpoint holds.
        eps: of its norms.
        norm_offset: norm weights are stored as an offset from 1.
        embed_scale: factor on embeddings, rounded to their dtype.
        softcap: logits are `cap * tanh(logits / cap)`; None leaves them.
        key_layers: per layer what heads can read of it, None where they cannot.
    """

    family: str
    hidden: int
    vocab: int
    num_layers: int
    layer_kinds: tuple[str, ...]
    stop_ids: tuple[int, ...]
    max_context: int
    draft_block: BlockConfig | None = None
    draft_layer: LayerKind | None = None
    draft_modules: int = 0
    eps: float = 1e-6
    norm_offset: bool = False
    embed_scale: float = 1.0
    softcap: float | None = None
    key_layers: tuple[KeyLayer | None, ...] = ()


@struct.dataclass
class Cache:
    """Everything a target remembers of its rows.

    Attributes:
        layers: one entry per layer (None for a layer that reads another's).
        lengths: `[B]` int32, committed positions per row.
    """

    layers: tuple[PyTree, ...]
    lengths: Int[Array, " B"]


@struct.dataclass
class TargetOut:
    """What a forward pass returns.

    Attributes:
        hidden: `[B, T, H]` after the final norm.
        taps: `[n, B, T, H]` residual streams asked for, in the order asked.
        update: what `commit` appends, one entry per layer.
    """

    hidden: Float[Array, "B T H"]
    taps: Float[Array, "n B T H"]
    update: tuple[PyTree, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """The functions of a family, module-level so that they compare by identity across loads.

    Attributes:
        read_config: published `config.json` (a dict) to the family's frozen configuration.
        info: configuration to TargetInfo.
        specs: configuration to the tree of ParamSpec.
        ignored: (config) to shell patterns of tensors that a load skips.
        init_cache: (config, batch, capacity, dtype) to layer caches.
        forward: see `Target.forward`.
        commit: (config, layers, lengths, update, n) to layer caches.
        logits: (params, config, hidden) to float32 logits.
        embed: (params, config, tokens) to embeddings as the first layer gets them.
        output_weights: (params, config) to `[V, H]`.
        entry: (config, layers of a cache or an update, index) to those of one layer.
    """

    read_config: Callable[[Mapping[str, Any]], Any]
    info: Callable[[Any], TargetInfo]
    specs: Callable[[Any], PyTree]
    init_cache: Callable[..., tuple[PyTree, ...]]
    forward: Callable[..., TargetOut]
    commit: Callable[..., tuple[PyTree, ...]]
    logits: Callable[..., jax.Array]
    embed: Callable[..., jax.Array]
    output_weights: Callable[..., jax.Array]
    entry: Callable[..., PyTree]
    ignored: Callable[[Any], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Target:
    """A target without its weights: hashable, equal by value, static under `jax.jit`.

    Attributes:
        family: what its architecture can do.
        config: its sizes and how it is run.
        layout: how its weights lie on a mesh; None on one device. Only what the compiler would not
            split well by itself looks at it.
    """

    family: Family
    config: Any
    layout: Layout | None = None

    @property
    def info(self) -> TargetInfo:
        """Static facts of this target."""
        return self.family.info(self.config)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Shell patterns of tensors in its checkpoints that it has no use for."""
        return self.family.ignored(self.config)

    def specs(self) -> PyTree:
        """Return the weight table: a tree of ParamSpec."""
        return self.family.specs(self.config)

    def init_cache(self, batch: int, capacity: int, dtype: str = "float32") -> Cache:
        """Return an empty cache for `batch` rows of at most `capacity` positions."""
        layers = self.family.init_cache(self.config, batch, capacity, dtype)
        return Cache(layers=layers, lengths=jnp.zeros((batch,), jnp.int32))

    def forward(
        self,
        params: PyTree,
        tokens: Int[Array, "B T"],
        valid: Int[Array, " B"] | None = None,
        cache: Cache | None = None,
        taps: tuple[int, ...] = (),
        packing: Packing | None = None,
        documents: Documents | None = None,
    ) -> TargetOut:
        """Run T new positions behind the cached ones; nothing is written.

        Args:
            params: weights.
            tokens: token ids, right padded.
            valid: `[B]` real tokens per row; None means all T. States of pads carry no meaning.
            cache: what came before; None means nothing did.
            taps: residual streams to return: 0 is the embedding output, i the stream after i
                layers (L: before the final norm), as transformers counts `hidden_states`.
            packing: of the `valid` positions; products then run on these alone, and `hidden` and
                `taps` come packed, `[1, N, H]` and `[n, 1, N, H]`. The update does not.
            documents: the texts of rows that hold several; each gives what it gives alone, with
                positions from 0. The update is for reading (`entries`): `commit` would take a row
                for one text.

        Raises:
            ValueError: a tap outside 0..L, or documents together with a cache or a packing.
        """
        if documents is not None and not (cache is None and packing is None):
            raise ValueError("documents stand at the start of their rows: no cache, no packing")
        if any(not 0 <= tap <= self.info.num_layers for tap in taps):
            raise ValueError(f"taps {taps} outside 0..{self.info.num_layers}")
        if valid is None:
            valid = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
        return self.family.forward(
            params, self.config, tokens, valid, cache, taps, packing, documents, self.layout
        )

    def commit(self, cache: Cache, update: tuple[PyTree, ...], n: Int[Array, " B"]) -> Cache:
        """Append the first `n[b]` positions of an update to row b: the only writer of a cache."""
        layers = self.family.commit(self.config, cache.layers, cache.lengths, update, n)
        return Cache(layers=layers, lengths=cache.lengths + n)

    def entries(self, layers: tuple[PyTree, ...], wanted: tuple[int, ...]) -> tuple[PyTree, ...]:
        """Return what a cache or an update (its `layers`) holds of the layers `wanted`."""
        return tuple(self.family.entry(self.config, layers, i) for i in wanted)

    def logits(self, params: PyTree, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """Return float32 logits of states after the final norm."""
        return self.family.logits(params, self.config, hidden)

    def embed(self, params: PyTree, tokens: Int[Array, ...]) -> Float[Array, "... H"]:
        """Return embeddings as the first layer gets them."""
        return self.family.embed(params, self.config, tokens)

    def input_embedding(self, params: PyTree) -> Float[Array, "V H"]:
        """Return the input embedding's matrix, unscaled."""
        return params.embedding

    def output_weights(self, params: PyTree) -> Float[Array, "V H"]:
        """Return the output layer's matrix (the embedding where they are tied)."""
        return self.family.output_weights(params, self.config)
