"""Experts on a mesh: each device runs the tokens it has through the experts it holds.

Routing is computed where the tokens are, by every device that has them; an expert that lies
elsewhere costs nothing; one sum over the devices that share the work makes the result whole. Left
to the compiler, the sort of tokens by expert would gather them, and each expert's weights.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from specjax.core.errors import ConfigError
from specjax.core.packed import BlockFp8
from specjax.core.sharding import Layout
from specjax.layers.moe import Activation, ExpertWeights, experts
from specjax.layers.router import RouterConfig, route

PyTree = Any


def mixture(
    weights: ExpertWeights,
    x: Float[Array, "N H"],
    logits: Float[Array, "N E"],
    router: RouterConfig,
    activation: Activation,
    choice_bias: Float[Array, " E"] | None = None,
    expert_scale: Float[Array, " E"] | None = None,
    layout: Layout | None = None,
) -> Float[Array, "N H"]:
    """Route N tokens and run them through their experts.

    Args:
        weights: of the experts.
        x: what the experts get.
        logits: the router's.
        router: how it chooses.
        activation: of the experts' gate.
        choice_bias: see `route`.
        expert_scale: see `route`.
        layout: how weights lie on a mesh; None on one device.

    Raises:
        ConfigError: experts that do not divide, or whose scales do not.
    """
    if layout is None:
        ids, probs = route(logits, router, choice_bias, expert_scale)
        return experts(weights, x, ids, probs, activation)
    rules, mesh = dict(layout.rules), layout.mesh

    def real(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if mesh.shape[axis] > 1)

    shared, split = real(rules["experts"]), real(rules["mlp"])
    rows = real(rules["batch"])
    if x.shape[0] % math.prod(mesh.shape[axis] for axis in rows):
        rows = ()  # a few packed tokens: every device takes them all
    by_row = PartitionSpec(rows or None)

    def lay(table: PyTree, axes: tuple[str, str, str]) -> PyTree:
        lead = () if weights.layer is None else (None,)
        if isinstance(table, BlockFp8):
            for size, block, axis in zip(table.shape[-2:], table.block, axes[1:], strict=True):
                ways = math.prod(mesh.shape[name] for name in rules[axis])
                if ways > 1 and size % (ways * block):
                    raise ConfigError(
                        f"experts: {axis} of {size} in blocks of {block} that share a scale does"
                        f" not divide over {' x '.join(rules[axis])} of {ways}: choose another"
                        " mesh, such as more of Mesh.expert"
                    )

        def one(leaf: jax.Array) -> PartitionSpec:
            return layout.spec((*lead, *axes)[: leaf.ndim], leaf.shape, f"experts' {axes[1:]}")

        return jax.tree.map(one, table)

    tables = dataclasses.replace(weights, layer=None)
    specs = ExpertWeights(
        gate=lay(weights.gate, ("experts", "mlp", "embed")),
        up=lay(weights.up, ("experts", "mlp", "embed")),
        down=lay(weights.down, ("experts", "embed", "mlp")),
    )
    given = {"layer": weights.layer, "choice_bias": choice_bias, "expert_scale": expert_scale}
    whole = jax.tree.map(lambda _: PartitionSpec(), given)

    def run(tables: ExpertWeights, given: Any, x: jax.Array, logits: jax.Array) -> jax.Array:
        ids, probs = route(logits, router, given["choice_bias"], given["expert_scale"])
        held = dataclasses.replace(tables, layer=given["layer"])
        count = held.gate.shape[-3]
        first = jax.lax.axis_index(shared) * count if shared else 0
        here = (ids >= first) & (ids < first + count)
        ids = jnp.where(here, ids - first, count)
        y = experts(held, x, ids, probs, activation, dtype=jnp.float32)
        return jax.lax.psum(y, (*shared, *split)) if shared or split else y

    spread = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs, whole, by_row, by_row),
        out_specs=by_row,
        check_vma=False,
    )
    return spread(tables, given, x, logits).astype(x.dtype)
