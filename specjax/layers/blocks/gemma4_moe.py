"""Gemma 4's mixture of experts, which stands beside the dense MLP instead of replacing it.

    d = norm(dense; post_1);  s = norm(experts(norm(x; pre_2)); post_2);  result d + s

Both branches start at the same residual stream x. The router reads x itself, normalised without a
weight and scaled: softmax over all experts, the chosen weights renormalised, then each times a
learned factor of its expert.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.core.params import ParamSpec
from specjax.core.sharding import Layout
from specjax.layers.blocks.dense import norm_spec
from specjax.layers.gelu import gelu_tanh
from specjax.layers.linear import linear_f32
from specjax.layers.moe import ExpertWeights
from specjax.layers.moe_mesh import mixture
from specjax.layers.norm import rms_norm
from specjax.layers.router import RouterConfig

Weight = Any


@dataclasses.dataclass(frozen=True)
class SparseBranch:
    """Sizes of the experts beside an MLP.

    Attributes:
        hidden: width H of the residual stream.
        width: width of an expert.
        router: how experts are chosen.
        eps: of the norms.
    """

    hidden: int
    width: int
    router: RouterConfig
    eps: float


@struct.dataclass
class SparseBranchWeights:
    """Weights of the experts and of the norms that join them to the MLP.

    Attributes:
        gate: `[E, H]` the router.
        scale: `[H]` of the router's input.
        expert_scale: `[E]` factor on an expert's weight.
        experts: the experts, stacked.
        pre_norm: `[H]` in front of the experts.
        post_norm: `[H]` behind them.
        dense_norm: `[H]` behind the MLP.
    """

    gate: Weight
    scale: Weight
    expert_scale: Weight
    experts: ExpertWeights
    pre_norm: Weight
    post_norm: Weight
    dense_norm: Weight

    @classmethod
    def abstract(cls, config: SparseBranch, prefix: str) -> SparseBranchWeights:
        """Return the specs under a layer's prefix, e.g. `model.layers.0.`."""
        hidden, count = config.hidden, config.router.experts
        scale = ParamSpec((count,), (None,), f"{prefix}router.per_expert_scale", init="ones")
        return cls(
            # Every device routes all tokens, so the router is not split over experts.
            gate=ParamSpec((count, hidden), (None, "embed"), f"{prefix}router.proj.weight"),
            scale=norm_spec(hidden, f"{prefix}router.scale"),
            expert_scale=scale,
            experts=ExpertWeights.abstract(count, config.width, hidden, prefix),
            pre_norm=norm_spec(hidden, f"{prefix}pre_feedforward_layernorm_2.weight"),
            post_norm=norm_spec(hidden, f"{prefix}post_feedforward_layernorm_2.weight"),
            dense_norm=norm_spec(hidden, f"{prefix}post_feedforward_layernorm_1.weight"),
        )


def router_logits(
    weights: SparseBranchWeights, config: SparseBranch, x: Float[Array, "N H"]
) -> Float[Array, "N E"]:
    """Return the router's float32 logits for N positions of the residual stream."""
    normed = rms_norm(x.astype(jnp.float32), None, config.eps)
    scaled = normed * weights.scale.astype(jnp.float32) * config.hidden**-0.5
    return linear_f32(scaled, weights.gate)


def join_experts(
    weights: SparseBranchWeights,
    config: SparseBranch,
    x: Float[Array, "B T H"],
    dense: Float[Array, "B T H"],
    layout: Layout | None = None,
) -> Float[Array, "B T H"]:
    """Return the sum of both branches.

    Args:
        weights: see SparseBranchWeights.
        config: sizes.
        x: the residual stream that both branches read.
        dense: what the MLP made of it.
        layout: how weights lie on a mesh; None on one device.
    """
    rows, eps = x.reshape(-1, config.hidden), config.eps
    mixed = mixture(
        weights.experts,
        rms_norm(rows, weights.pre_norm, eps),
        router_logits(weights, config, rows),
        config.router,
        gelu_tanh,
        expert_scale=weights.expert_scale,
        layout=layout,
    )
    sparse = rms_norm(mixed.reshape(x.shape), weights.post_norm, eps)
    return rms_norm(dense, weights.dense_norm, eps) + sparse
