"""Experts: every token through the k gated MLPs its router chose, and no others.

    y_n = sum_j probs[n, j] * down_e(activation(gate_e x_n) * up_e x_n),   e = ids[n, j]

Exact in every method: no token is dropped, no capacity is set. Shapes are static; what varies with
the routing is how many of a bounded number of blocks have work.

- "gathered": the weights of each token's experts are gathered, one batched product. For few tokens.
- "sorted": pairs of token and expert are sorted by expert and cut into blocks that belong to one
  expert each; a scan takes one block after the other, so that the weights of one expert are live,
  and skips blocks without work.
- "ragged": `jax.lax.ragged_dot`. On TPUs a grouped product. Elsewhere jax 0.10 expands it to every
  expert for every token: [E, N k, H] in memory on CPUs, likewise on CUDA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.packed import is_packed
from specjax.core.params import ParamSpec, stack
from specjax.layers.linear import linear_f32

Weight = Any  # ParamSpec, jax.Array, ShapeDtypeStruct or a packed leaf
Activation = Callable[[jax.Array], jax.Array]
METHODS = ("auto", "gathered", "sorted", "ragged")

# Up to how many pairs of token and expert "auto" gathers on the CPU: never. From one token on
# "sorted" is as fast or faster (128 experts of 1024 x 384, 8 per token, float32: 7 against 18 ms
# for one token, 33 against 180 for four). `python scripts/bench_moe.py` prints this crossover.
_GATHERED_ON_CPU = 0
# Elsewhere, not measured: the steps of a scan are launched one by one, a gather is one kernel.
_GATHERED_ELSEWHERE = 64
_SHORTEST_BLOCK, _LONGEST_BLOCK = 4, 128


@struct.dataclass
class ExpertWeights:
    """E gated MLPs of width I, stacked.

    Attributes:
        gate: `[E, I, H]`.
        up: `[E, I, H]`.
        down: `[E, H, I]`.
        layer: which layer of tables `[L, E, ...]`; None where they are of one layer.
    """

    gate: Weight
    up: Weight
    down: Weight
    layer: Any = None

    def at_layer(self, layer: int | Int[Array, ""]) -> ExpertWeights:
        """Return the experts of one layer of stacked tables, without taking them out.

        A scan over layers must not slice these tables: a slice is a copy of all experts, used or
        not (and on the CPU, in bfloat16, of all layers in float32). `targets.layer_loop` calls
        this for every record that has it.
        """
        return dataclasses.replace(self, layer=layer)

    @classmethod
    def abstract(
        cls,
        experts: int,
        width: int,
        hidden: int,
        prefix: str,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> ExpertWeights:
        """Return the specs, stacked from the published tensors of each expert.

        Args:
            experts: number of experts.
            width: width I of an expert.
            hidden: width H of the residual stream.
            prefix: what stands before `experts.{e}.`, e.g. `model.layers.0.mlp.`.
            names: gate, up and down.
        """

        def table(name: str, out: int, into: int, axes: tuple[str, str]) -> ParamSpec:
            return stack(
                [
                    ParamSpec((out, into), axes, f"{prefix}experts.{e}.{name}.weight")
                    for e in range(experts)
                ],
                "experts",
            )

        gate, up, down = names
        return cls(
            gate=table(gate, width, hidden, ("mlp", "embed")),
            up=table(up, width, hidden, ("mlp", "embed")),
            down=table(down, hidden, width, ("embed", "mlp")),
        )


def experts(
    weights: ExpertWeights,
    x: Float[Array, "N H"],
    ids: Int[Array, "N k"],
    probs: Float[Array, "N k"],
    activation: Activation,
    *,
    method: str = "auto",
    dtype: Any = None,
) -> Float[Array, "N H"]:
    """Send N tokens through their experts.

    Gradients: with respect to `x` and `probs` every method is right, and "sorted" holds no expert's
    weights for it. With respect to the weights all are right too, but "sorted" adds up a whole
    table per block; train experts with "gathered" or "ragged".

    Args:
        weights: tables, arrays or packed.
        x: tokens, in the dtype to compute in; sums are float32.
        ids: experts of each token, 0 to E - 1, all different; E stands for no expert and costs
            nothing where blocks are skipped (pads, experts that other devices hold).
        probs: their weights.
        activation: of the gate, applied in float32.
        method: one of METHODS; "auto" chooses by platform and number of tokens.
        dtype: of the result; None for that of `x`.

    Returns:
        `[N, H]`.

    Raises:
        ValueError: an unknown method, or "ragged" for packed weights, which would unpack all.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r}; have {', '.join(METHODS)}")
    packed = any(is_packed(w) for w in (weights.gate, weights.up, weights.down))
    if method == "ragged" and packed:
        raise ValueError("ragged needs arrays; packed experts go by 'gathered' or 'sorted'")

    def by(name: str) -> Callable[..., jax.Array]:
        runs: dict[str, Callable[..., jax.Array]]
        runs = {"gathered": gathered, "sorted": sorted_blocks, "ragged": ragged}
        return lambda *arrays: runs[name](*arrays, activation)

    arrays = (weights, x, ids, probs)
    if method != "auto":
        y = by(method)(*arrays)
    else:
        chosen = _automatic(ids.size, packed)
        default = chosen.pop("default")
        others = {platform: by(name) for platform, name in chosen.items() if name != default}
        y = jax.lax.platform_dependent(*arrays, default=by(default), **others)
    return y.astype(dtype or x.dtype)


def _automatic(pairs: int, packed: bool) -> dict[str, str]:
    """Choose the method per platform."""
    default = "gathered" if pairs <= _GATHERED_ELSEWHERE else "sorted"
    return {
        "cpu": "gathered" if pairs <= _GATHERED_ON_CPU else "sorted",
        "tpu": default if packed else "ragged",
        "default": default,
    }


def _pick(weights: ExpertWeights, ids: jax.Array) -> ExpertWeights:
    """Take experts out of their tables, packed ones still packed."""
    at = ids if weights.layer is None else (weights.layer, ids)
    return jax.tree.map(lambda leaf: leaf[at], dataclasses.replace(weights, layer=None))


def _mlp(weights: ExpertWeights, x: jax.Array, activation: Activation) -> jax.Array:
    """Run rows `[m, H]` through one expert; float32 `[m, H]`."""
    hidden = activation(linear_f32(x, weights.gate)) * linear_f32(x, weights.up)
    return linear_f32(hidden.astype(x.dtype), weights.down)


def _mix(y: jax.Array, ids: jax.Array, probs: jax.Array, count: int) -> jax.Array:
    """Add up the outputs `[N k, H]` of each token's experts; "no expert" counts as zero."""
    y = jnp.where((ids < count)[..., None], y.reshape(*ids.shape, -1), 0)
    return (y * probs.astype(jnp.float32)[..., None]).sum(1)


def gathered(
    weights: ExpertWeights,
    x: Float[Array, "N H"],
    ids: Int[Array, "N k"],
    probs: Float[Array, "N k"],
    activation: Activation,
) -> Float[Array, "N H"]:
    """Compute `experts` on a copy of the weights per pair of token and expert; float32."""
    count = weights.gate.shape[-3]
    chosen = _pick(weights, jnp.minimum(ids.reshape(-1), count - 1))
    rows = jnp.repeat(x, ids.shape[1], axis=0)[:, None]
    y = jax.vmap(lambda w, row: _mlp(w, row, activation))(chosen, rows)
    return _mix(y, ids, probs, count)


def _order(flat: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort pairs `[P]` by expert: (pair at each rank, rank of each pair, pairs per expert)."""
    order = jnp.argsort(flat, stable=True)
    at = jnp.arange(flat.size, dtype=jnp.int32)
    rank = jnp.zeros_like(at).at[order].set(at, unique_indices=True)
    return order, rank, jnp.zeros(count, jnp.int32).at[flat].add(1, mode="drop")


def ragged(
    weights: ExpertWeights,
    x: Float[Array, "N H"],
    ids: Int[Array, "N k"],
    probs: Float[Array, "N k"],
    activation: Activation,
) -> Float[Array, "N H"]:
    """Compute `experts` by grouped products; float32."""
    if (layer := weights.layer) is not None:
        tables = dataclasses.replace(weights, layer=None)
        weights = jax.tree.map(lambda leaf: leaf[layer], tables)
    count = weights.gate.shape[-3]
    order, rank, sizes = _order(ids.reshape(-1), count)
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )

    def product(rows: jax.Array, table: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot_general(
            rows,
            table.astype(rows.dtype),
            sizes,
            numbers,
            precision=jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    rows = x[order // ids.shape[1]]
    hidden = activation(product(rows, weights.gate)) * product(rows, weights.up)
    y = product(hidden.astype(x.dtype), weights.down)
    return _mix(y[rank], ids, probs, count)


def block_rows(tokens: int, k: int, count: int) -> int:
    """Choose the rows of a block: twice the mean number of pairs per expert, a power of two.

    Shorter blocks read an expert's weights again, longer ones multiply rows without work. Between
    4 rows, which cost hardly more than one, and what compute bounds anyway; but no longer than one
    expert can have tokens. Measured with `scripts/bench_moe.py --rows 1 2 4 8 16 32 64`.
    """
    wanted = max(2 * tokens * k / count, _SHORTEST_BLOCK)
    rows = 1
    while rows < min(wanted, tokens, _LONGEST_BLOCK):
        rows *= 2
    return rows


def sorted_blocks(
    weights: ExpertWeights,
    x: Float[Array, "N H"],
    ids: Int[Array, "N k"],
    probs: Float[Array, "N k"],
    activation: Activation,
    *,
    rows: int | None = None,
) -> Float[Array, "N H"]:
    """Compute `experts` block by block; float32.

    The products stand in a branch of `lax.cond`. That skips blocks without work, and it keeps XLA's
    CPU backend from converting whole bfloat16 tables to float32 in front of the loop, as it does
    for a slice taken in a plain loop body (64 experts of 1024 x 384: 135 ms instead of 12).

    Args:
        weights: see `experts`.
        x: see `experts`.
        ids: see `experts`.
        probs: see `experts`.
        activation: see `experts`.
        rows: rows per block m; None for `block_rows`.
    """
    count, (tokens, k) = weights.gate.shape[-3], ids.shape
    pairs, flat = tokens * k, ids.reshape(-1)
    rows = block_rows(tokens, k, count) if rows is None else rows
    order, rank, sizes = _order(flat, count)
    starts = jnp.cumsum(sizes) - sizes
    blocks = -(-sizes // rows)
    ends = jnp.cumsum(blocks)  # blocks of this expert and those before it
    firsts = ends - blocks
    # ceil(size / m) <= (size + m - 1) / m, and at most min(E, P) experts have any pair.
    bound = (pairs + min(count, pairs) * (rows - 1)) // rows
    number = jnp.arange(bound, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    owner = jnp.minimum(owner, count - 1)
    place = (number - firsts[owner])[:, None] * rows + jnp.arange(rows, dtype=jnp.int32)
    # Places behind an expert's last pair repeat some other row; nobody reads what becomes of it.
    pair = order[jnp.clip(starts[owner][:, None] + place, 0, pairs - 1)]

    def work(expert: jax.Array, x: jax.Array) -> jax.Array:
        return _mlp(_pick(weights, expert), x, activation)

    def idle(expert: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, jnp.float32)

    # For gradients, take the expert's weights again. Inside the branch this would not help: what a
    # branch needs later leaves it as an output, and the scan would stack whole tables.
    @jax.checkpoint
    def step(_: None, block: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        busy, expert, x = block
        return None, jax.lax.cond(busy, work, idle, expert, x)

    _, y = jax.lax.scan(step, None, (number < ends[-1], owner, x[pair // k]))
    slot = (firsts * rows - starts)[jnp.minimum(flat, count - 1)] + rank
    return _mix(y.reshape(bound * rows, -1)[slot], ids, probs, count)
