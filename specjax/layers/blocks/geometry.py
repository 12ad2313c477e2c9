"""The two layers a draft head can be made of, behind one set of functions.

What a head's layer attends to is not the plain past: the context and the slots of a block, or the
true pairs and a chain of recycled ones. So queries and keys are projected apart, and what lies
between them (which keys a query sees) is the caller's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from specjax.layers.blocks import gemma4
from specjax.layers.blocks.dense import BlockConfig, LayerWeights, mlp
from specjax.layers.blocks.gemma4 import Gemma4Layer, Gemma4Weights
from specjax.layers.linear import linear
from specjax.layers.norm import rms_norm
from specjax.layers.rope import RopeConfig, apply_rope

Tables = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class PlainGeometry:
    """Layers of Qwen3's or Llama's form.

    Attributes:
        block: their sizes.
    """

    block: BlockConfig

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.block.hidden

    @property
    def eps(self) -> float:
        """Of the norms."""
        return self.block.eps

    @property
    def rope(self) -> RopeConfig:
        """How positions turn queries and keys."""
        return self.block.rope

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Key-value heads, size of a key, size of a value."""
        return self.block.kv_heads, self.block.head_dim, self.block.head_dim

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return self.block.head_dim**-0.5

    def abstract(self, prefix: str) -> LayerWeights:
        """Return a layer's weight table."""
        return LayerWeights.abstract(self.block, prefix)

    def queries(
        self, weights: LayerWeights, x: Float[Array, "B T H"], tables: Tables
    ) -> Float[Array, "B M T D"]:
        """Project normed inputs to queries, norm and rope applied."""
        w = weights.attention
        return apply_rope(self._heads(x, w.q, w.q_bias, w.q_norm), *tables)

    def keys(
        self, weights: LayerWeights, x: Float[Array, "B T H"], tables: Tables
    ) -> tuple[Float[Array, "B N T D"], Float[Array, "B N T D"]]:
        """Project normed inputs to (keys, values)."""
        w = weights.attention
        k = apply_rope(self._heads(x, w.k, w.k_bias, w.k_norm), *tables)
        return k, self._heads(x, w.v, w.v_bias, None)

    def _heads(self, x: jax.Array, w: Any, bias: Any, norm: Any) -> jax.Array:
        y = linear(x, w, bias)
        y = y.reshape(*y.shape[:-1], -1, self.block.head_dim)
        y = y if norm is None else rms_norm(y, norm, self.block.eps)
        return y.transpose(0, 2, 1, 3)

    def output(self, weights: LayerWeights, mixed: Float[Array, "B T F"]) -> jax.Array:
        """Project what attention mixed back to the residual stream."""
        return linear(mixed, weights.attention.o, weights.attention.o_bias)

    def finish(
        self, weights: LayerWeights, x: Float[Array, "B T H"], attended: Float[Array, "B T H"]
    ) -> Float[Array, "B T H"]:
        """Return the residual stream after a layer, given what its attention gave."""
        x = x + attended
        return x + mlp(weights.mlp, rms_norm(x, weights.post_norm, self.block.eps))


@dataclasses.dataclass(frozen=True)
class Gemma4Geometry:
    """Layers of the form of Gemma 4's full-attention ones: sandwich norms, normed values.

    Attributes:
        layer: what they are; without experts, inputs of their own or shared keys.
    """

    layer: Gemma4Layer

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.layer.attention.hidden

    @property
    def eps(self) -> float:
        """Of the norms."""
        return self.layer.attention.eps

    @property
    def rope(self) -> RopeConfig:
        """How positions turn queries and keys."""
        return self.layer.attention.rope

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Key-value heads, size of a key, size of a value."""
        attention = self.layer.attention
        return attention.kv_heads, attention.head_dim, attention.head_dim

    @property
    def scale(self) -> float:
        """Factor on attention scores: queries and keys are normed instead."""
        return 1.0

    def abstract(self, prefix: str) -> Gemma4Weights:
        """Return a layer's weight table."""
        return self.layer.abstract(prefix)

    def queries(
        self, weights: Gemma4Weights, x: Float[Array, "B T H"], tables: Tables
    ) -> Float[Array, "B M T D"]:
        """Project normed inputs to queries, norm and rope applied."""
        return gemma4.project_queries(weights.attention, self.layer.attention, x, *tables)

    def keys(
        self, weights: Gemma4Weights, x: Float[Array, "B T H"], tables: Tables
    ) -> tuple[Float[Array, "B N T D"], Float[Array, "B N T D"]]:
        """Project normed inputs to (keys, values)."""
        return gemma4.project_keys(weights.attention, self.layer.attention, x, *tables)

    def output(self, weights: Gemma4Weights, mixed: Float[Array, "B T F"]) -> jax.Array:
        """Project what attention mixed back to the residual stream."""
        return linear(mixed, weights.attention.o, weights.attention.o_bias)

    def finish(
        self, weights: Gemma4Weights, x: Float[Array, "B T H"], attended: Float[Array, "B T H"]
    ) -> Float[Array, "B T H"]:
        """Return the residual stream after a layer, given what its attention gave."""
        return gemma4.finish(weights, self.layer, x, attended)


Geometry = PlainGeometry | Gemma4Geometry
