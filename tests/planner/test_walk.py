"""Costs against closed forms and against XLA's own analysis."""

import jax
import jax.numpy as jnp
import pytest

from specjax.core.packed import BlockFp8, GroupInt4
from specjax.layers.linear import linear_f32
from specjax.layers.moe import ExpertWeights, experts
from specjax.planner.cost import Cost
from specjax.planner.program import flatten
from specjax.planner.walk import walk

BF16 = jnp.bfloat16


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def count(function, *args, platform: str = "cuda") -> Cost:
    return walk(flatten(jax.make_jaxpr(function)(*args), platform))


def test_a_dense_layer_is_two_flops_per_weight_and_row_and_reads_each_weight_once() -> None:
    rows, into, out = 6, 40, 24
    cost = count(linear_f32, shape(rows, into, dtype=BF16), shape(out, into, dtype=BF16))
    assert cost.flops == 2 * rows * into * out
    # Weights and activations in, sums in float32 out.
    assert cost.bytes == 2 * (out * into + rows * into) + 4 * rows * out
    assert cost.steps == 1


def test_products_are_those_of_xla_where_nothing_loops() -> None:
    def mlp(x, gate, up, down):
        return jnp.einsum("bth,fh->btf", x, gate) * (x @ up.T) @ down.T

    args = shape(2, 3, 8), shape(16, 8), shape(16, 8), shape(8, 16)
    cost = count(mlp, *args)
    analysis = jax.jit(mlp).lower(*args).cost_analysis()
    elementwise = 2 * 3 * 16  # the one multiplication that is no product, which XLA counts too
    assert cost.flops == analysis["flops"] - elementwise


def test_bytes_are_those_of_xla_for_a_single_product() -> None:
    args = shape(6, 40), shape(40, 24)
    analysis = jax.jit(jnp.dot).lower(*args).cost_analysis()
    assert count(jnp.dot, *args).bytes == analysis["bytes accessed"]


@pytest.mark.parametrize("turns", [1, 5])
def test_a_loop_counts_its_turns_where_xla_counts_one(turns: int) -> None:
    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    args = shape(4, 8), shape(turns, 8, 8)
    cost = count(layers, *args)
    assert cost.flops == turns * 2 * 4 * 8 * 8
    assert cost.bytes == turns * 4 * (8 * 8 + 4 * 8 + 4 * 8)
    assert cost.steps == turns


def test_turns_that_do_not_wait_for_each_other_are_one_step() -> None:
    cost = count(lambda xs, w: jax.lax.map(lambda x: x @ w, xs), shape(7, 4, 8), shape(8, 8))
    assert cost.flops == 7 * 2 * 4 * 8 * 8
    assert cost.steps == 1


def test_packed_weights_are_read_packed() -> None:
    out, into, rows = 32, 64, 2
    int4 = GroupInt4(shape(out, into // 8, dtype=jnp.int32), shape(out, into // 32))
    fp8 = BlockFp8(shape(out, into, dtype=jnp.uint8), shape(1, 1), (128, 128))
    x = shape(rows, into, dtype=BF16)
    around = 2 * rows * into + 4 * rows * out
    assert count(linear_f32, x, int4).bytes == around + out * into // 2 + 4 * out * into // 32
    assert count(linear_f32, x, fp8).bytes == around + out * into + 4


def test_a_lookup_reads_its_rows_and_not_the_table() -> None:
    cost = count(lambda table, ids: table[ids].sum(0), shape(1000, 16), shape(3, dtype=jnp.int32))
    assert cost.bytes < 1000 * 16
    assert cost.bytes >= 3 * 16 * 4


def _mixture(tokens: int, k: int, platform: str, layers: int, dtype) -> Cost:
    hidden, width = 128, 96
    lead = (layers, 16) if layers else (16,)
    weights = ExpertWeights(
        gate=shape(*lead, width, hidden, dtype=dtype),
        up=shape(*lead, width, hidden, dtype=dtype),
        down=shape(*lead, hidden, width, dtype=dtype),
    )
    ids = shape(tokens, k, dtype=jnp.int32)
    x, probs = shape(tokens, hidden, dtype=BF16), shape(tokens, k)

    def run(weights, x, ids, probs):
        if not layers:
            return experts(weights, x, ids, probs, jax.nn.silu)

        def layer(x, number):
            return experts(weights.at_layer(number), x, ids, probs, jax.nn.silu), None

        return jax.lax.scan(layer, x, jnp.arange(layers))[0]

    return count(run, weights, x, ids, probs, platform=platform)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(("tokens", "k"), [(1, 2), (8, 4), (100, 4)])
@pytest.mark.parametrize("layers", [0, 3])
def test_experts_are_read_as_far_as_tokens_reach(
    platform: str, tokens: int, k: int, layers: int
) -> None:
    """`min(experts, tokens * k)` of them in each layer, however many blocks are run."""
    wide, narrow = (_mixture(tokens, k, platform, layers, d) for d in (jnp.float32, BF16))
    weights = (wide.bytes - narrow.bytes) / 2  # all else moves the same bytes
    assert weights == max(layers, 1) * min(16, tokens * k) * 3 * 128 * 96


def test_a_second_pass_reads_the_same_experts_again() -> None:
    """A cap on what is read holds within a pass and not over the passes of a loop around it."""
    hidden, held = 64, 8
    table = shape(held, hidden, hidden)

    def passes(x, ids, table):
        def one(x, _):
            rows = jax.lax.map(lambda pair: pair[0] @ table[pair[1]], (x, ids))
            return rows, None

        return jax.lax.scan(one, x, None, length=5)[0]

    cost = count(passes, shape(20, 1, hidden), shape(20, dtype=jnp.int32), table)
    read = max(read for site in cost.sites for read in site.reads.values())
    assert read == 5 * held * hidden * hidden * 4


def test_a_scatter_writes_what_it_changes() -> None:
    def write(cache, new, at):
        return cache.at[at].set(new, mode="drop", unique_indices=True)

    cost = count(write, shape(1000, 8), shape(3, 8), shape(3, dtype=jnp.int32))
    assert cost.bytes == 2 * 3 * 8 * 4


def test_what_a_program_returns_is_written() -> None:
    """Element by element, without a step of its own: a state that decays is read and written."""
    cost = count(lambda state, decay: state * jnp.exp(decay), shape(100, 8), shape(100, 1))
    assert cost.bytes == 4 * (100 * 8 + 100 + 100 * 8)
    assert cost.steps == 0
    assert count(lambda state: state, shape(100, 8)).bytes == 0


def test_of_branches_the_costlier_counts() -> None:
    def function(busy, x, w):
        return jax.lax.cond(busy, lambda x: x @ w, lambda x: x, x)

    cost = count(function, shape(dtype=jnp.bool_), shape(4, 8), shape(8, 8))
    assert cost.flops == 2 * 4 * 8 * 8


def test_temporaries_are_what_is_alive_at_once() -> None:
    def chain(x, w):
        for _ in range(3):
            x = x @ w
        return x

    one = 4 * 8 * 4
    assert count(chain, shape(4, 8), shape(8, 8)).temporaries == 2 * one  # one read, one made
