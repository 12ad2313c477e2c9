"""The sparse feed-forward of mixture-of-experts layers: a router, experts, sometimes a shared one.

    y = sum_e w_e expert_e(x)  [+ [sigmoid(shared_gate x) *] shared(x)]

What families differ in is how the router scores (`layers.router`) and what tensors are called.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float

from specjax.core.params import ParamSpec
from specjax.core.sharding import Layout
from specjax.layers.blocks.dense import MlpWeights, mlp
from specjax.layers.linear import linear_f32
from specjax.layers.moe import ExpertWeights
from specjax.layers.moe_mesh import mixture
from specjax.layers.router import RouterConfig

Weight = Any


@dataclasses.dataclass(frozen=True)
class SparseNames:
    """What a family calls the tensors, below the layer's prefix.

    Attributes:
        gate: the router's matrix.
        bias: the router's correction of the choice, "" where there is none.
        experts: prefix of `experts.{e}.*`.
        projections: gate, up and down of an expert.
        shared: prefix of the shared expert.
        shared_gate: its gate, "" where it has none.
    """

    gate: str = "mlp.gate.weight"
    bias: str = ""
    experts: str = "mlp."
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_experts."
    shared_gate: str = ""


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """Sizes of a sparse feed-forward.

    Attributes:
        hidden: width H of the residual stream.
        width: width of an expert.
        router: how experts are chosen and weighted.
        shared: width of the shared expert, 0 for none.
        names: what its tensors are called.
    """

    hidden: int
    width: int
    router: RouterConfig
    shared: int = 0
    names: SparseNames = SparseNames()


@struct.dataclass
class SparseWeights:
    """Weights of a sparse feed-forward.

    Attributes:
        gate: `[E, H]` the router.
        bias: `[E]` added to scores for the choice alone, or None.
        experts: the experts, stacked.
        shared: the shared expert, or None.
        shared_gate: `[1, H]`, or None.
    """

    gate: Weight
    experts: ExpertWeights
    bias: Weight = None
    shared: MlpWeights | None = None
    shared_gate: Weight = None

    @classmethod
    def abstract(cls, config: SparseConfig, prefix: str) -> SparseWeights:
        """Return the specs under a layer's prefix, e.g. `model.layers.0.`."""
        names, count, hidden = config.names, config.router.experts, config.hidden
        bias = shared = shared_gate = None
        if names.bias:
            bias = ParamSpec((count,), (None,), prefix + names.bias, init="zeros", dtype="float32")
        if config.shared:
            shared = MlpWeights.abstract(hidden, config.shared, prefix + names.shared)
            if names.shared_gate:
                shared_gate = ParamSpec((1, hidden), (None, "embed"), prefix + names.shared_gate)
        return cls(
            # Every device routes all tokens, so the router is not split over experts.
            gate=ParamSpec((count, hidden), (None, "embed"), prefix + names.gate),
            experts=ExpertWeights.abstract(
                count, config.width, hidden, prefix + names.experts, names.projections
            ),
            bias=bias,
            shared=shared,
            shared_gate=shared_gate,
        )


def sparse_mlp(
    weights: SparseWeights,
    config: SparseConfig,
    x: Float[Array, "B T H"],
    layout: Layout | None = None,
) -> Float[Array, "B T H"]:
    """Send each position through its experts; exact, no position is dropped."""
    rows = x.reshape(-1, config.hidden)
    y = mixture(
        weights.experts,
        rows,
        linear_f32(rows, weights.gate),
        config.router,
        jax.nn.silu,
        choice_bias=weights.bias,
        layout=layout,
    ).reshape(x.shape)
    if weights.shared is None:
        return y
    shared = mlp(weights.shared, x)
    if weights.shared_gate is not None:
        gate = jax.nn.sigmoid(linear_f32(x, weights.shared_gate))
        shared = (shared * gate).astype(x.dtype)
    return y + shared
