"""Gemma 4's per-layer inputs: every layer gets a small vector of its own for each token.

    e = table[token] sqrt(P);  c = norm(project(x) H^-0.5);  inputs = (e + c) / sqrt(2)   [L, P]
    layer i:  x += norm(up(gelu(gate x) * inputs_i))

x in the first line is the scaled embedding, so the vectors depend on nothing but the token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.params import ParamSpec
from specjax.core.sharding import Layout, constrain
from specjax.layers.blocks.dense import norm_spec
from specjax.layers.embedding import lookup
from specjax.layers.gelu import gelu_tanh
from specjax.layers.linear import linear
from specjax.layers.norm import rms_norm

Weight = Any


@struct.dataclass
class PerLayerWeights:
    """What makes the inputs of all layers.

    Attributes:
        table: `[V, L * P]`.
        project: `[L * P, H]`.
        norm: `[P]`.
    """

    table: Weight
    project: Weight
    norm: Weight


@dataclasses.dataclass(frozen=True)
class PerLayerInputs:
    """The inputs of all layers (`targets.decoder.DecoderConfig.extra`).

    Attributes:
        layers: number of layers L.
        hidden: width H of the residual stream.
        size: size P of a layer's input.
        vocab: rows V of the table.
        eps: of the norm.
    """

    layers: int
    hidden: int
    size: int
    vocab: int
    eps: float

    def abstract(self) -> PerLayerWeights:
        """Return the weight table."""
        wide = self.layers * self.size
        return PerLayerWeights(
            table=ParamSpec(
                (self.vocab, wide), ("vocab", None), "model.embed_tokens_per_layer.weight"
            ),
            project=ParamSpec(
                (wide, self.hidden), ("mlp", "embed"), "model.per_layer_model_projection.weight"
            ),
            norm=ParamSpec(
                (self.size,), (None,), "model.per_layer_projection_norm.weight", init="ones"
            ),
        )

    def run(
        self,
        weights: PerLayerWeights,
        tokens: Int[Array, "B T"],
        x: Float[Array, "B T H"],
        layout: Layout | None = None,
    ) -> Float[Array, "B T L P"]:
        """Return the inputs of all layers.

        Args:
            weights: see PerLayerWeights.
            tokens: token ids.
            x: their embeddings, scaled.
            layout: how weights lie on a mesh; None on one device.
        """
        shape = (*tokens.shape, self.layers, self.size)
        rows = lookup(weights.table, tokens)
        own = (rows * jnp.asarray(self.size**0.5, rows.dtype)).reshape(shape)
        # Split over all layers' inputs, of which each layer wants its own: gathered once.
        seen = constrain(layout, linear(x, weights.project), ("batch", None, None))
        seen = (seen * self.hidden**-0.5).reshape(shape)
        return (rms_norm(seen, weights.norm, self.eps) + own) * 2**-0.5


@struct.dataclass
class InputWeights:
    """How one layer takes its input in.

    Attributes:
        gate: `[P, H]`.
        up: `[H, P]`.
        norm: `[H]`.
    """

    gate: Weight
    up: Weight
    norm: Weight

    @classmethod
    def abstract(cls, hidden: int, size: int, prefix: str) -> InputWeights:
        """Return the specs under a layer's prefix, e.g. `model.layers.0.`."""
        gate, up = f"{prefix}per_layer_input_gate.weight", f"{prefix}per_layer_projection.weight"
        return cls(
            gate=ParamSpec((size, hidden), ("mlp", "embed"), gate),
            up=ParamSpec((hidden, size), ("embed", "mlp"), up),
            norm=norm_spec(hidden, f"{prefix}post_per_layer_input_norm.weight"),
        )


def take_in(
    weights: InputWeights, eps: float, x: Float[Array, "B T H"], inputs: Float[Array, "B T P"]
) -> Float[Array, "B T H"]:
    """Return what a layer's own inputs add to the residual stream."""
    gated = gelu_tanh(linear(x, weights.gate)) * inputs
    return rms_norm(linear(gated, weights.up), weights.norm, eps)
