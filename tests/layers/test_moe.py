"""Experts against a float64 loop over tokens, and what each method may cost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.packed import BlockFp8, GroupInt4, Mxfp4
from specjax.core.params import leaves_with_names
from specjax.layers import moe
from specjax.layers.moe import ExpertWeights, block_rows, experts, sorted_blocks

RNG = np.random.default_rng(0)
E, H, I, N, K = 5, 16, 12, 7, 2  # noqa: E741
METHODS = ("gathered", "sorted", "ragged")  # "auto" on the CPU is "sorted"
silu = jax.nn.silu


def tables(count=E, hidden=H, width=I, lead=(), dtype=jnp.float32):
    shapes = ((count, width, hidden), (count, width, hidden), (count, hidden, width))
    return ExpertWeights(
        *(jnp.asarray(RNG.normal(size=(*lead, *shape)) * 0.3, dtype) for shape in shapes)
    )


def routing(count=E, tokens=N, k=K):
    return np.stack([RNG.permutation(count)[:k] for _ in range(tokens)]).astype(np.int32)


WEIGHTS = tables()
X = jnp.asarray(RNG.normal(size=(N, H)), jnp.float32)
PROBS = jnp.asarray(RNG.uniform(0.1, 1, size=(N, K)), jnp.float32)
IDS = jnp.asarray(routing())


def reference(weights, x, ids, probs):
    """One token after the other, in float64; ids of E and above are nobody."""
    gate, up, down = (
        np.asarray(t.astype(jnp.float32), np.float64)
        for t in (weights.gate, weights.up, weights.down)
    )
    x, probs = np.asarray(jnp.asarray(x, jnp.float32), np.float64), np.asarray(probs, np.float64)
    y = np.zeros_like(x)
    for n, token in enumerate(x):
        for e, p in zip(np.asarray(ids)[n], probs[n], strict=True):
            if e < len(gate):
                g = gate[e] @ token
                y[n] += p * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ token)))
    return y


@functools.partial(jax.jit, static_argnames="method")
def run(weights, x, ids, probs, method):
    return experts(weights, x, ids, probs, silu, method=method)


ROUTINGS = {
    "random": routing(),
    "all to the same": np.tile([[3, 1]], (N, 1)),
    "last and first": np.tile([[4, 0]], (N, 1)),
    "one after the other": (np.arange(N)[:, None] + np.arange(K)) % E,
    "some go nowhere": np.where(RNG.random((N, K)) < 0.5, E, routing()),
    "all go nowhere": np.full((N, K), E),
}


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_all_methods_do_what_the_formula_says(method):
    for name, ids in ROUTINGS.items():
        y = run(WEIGHTS, X, jnp.asarray(ids, jnp.int32), PROBS, method)
        want = reference(WEIGHTS, X, ids, PROBS)
        np.testing.assert_allclose(y, want, atol=3e-6, err_msg=name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("count", "tokens", "k"), [(7, 1, 1), (4, 1, 4), (9, 9, 1), (3, 33, 2)])
def test_sizes(method, count, tokens, k):
    weights, ids = tables(count), routing(count, tokens, k)
    if count == tokens:
        ids = RNG.permutation(count)[:, None].astype(np.int32)  # every token to another expert
    x = jnp.asarray(RNG.normal(size=(tokens, H)), jnp.float32)
    probs = jnp.asarray(RNG.uniform(size=(tokens, k)), jnp.float32)
    y = run(weights, x, jnp.asarray(ids), probs, method)
    np.testing.assert_allclose(y, reference(weights, x, ids, probs), atol=5e-6)


@pytest.mark.parametrize("rows", [1, 3, 4, 40])
def test_any_block_length_gives_the_same(rows):
    blocks = jax.jit(lambda ids: sorted_blocks(WEIGHTS, X, ids, PROBS, silu, rows=rows))
    for name, ids in ROUTINGS.items():
        y = blocks(jnp.asarray(ids, jnp.int32))
        np.testing.assert_allclose(y, reference(WEIGHTS, X, ids, PROBS), atol=3e-6, err_msg=name)


def test_block_rows():
    assert block_rows(1, 8, 128) == 1  # an expert cannot have more pairs than there are tokens
    assert block_rows(2, 8, 128) == 2
    assert block_rows(5, 8, 128) == 4
    assert block_rows(64, 8, 128) == 8  # twice the mean of 4
    assert block_rows(256, 4, 32) == 64
    assert block_rows(100_000, 8, 128) == 128


@pytest.mark.parametrize("method", METHODS)
def test_pads_leave_no_trace_in_real_tokens(method):
    pads = np.asarray([False, True, False, False, True, True, False])
    clean = run(WEIGHTS, X, IDS, PROBS, method)
    x = jnp.where(pads[:, None], jnp.nan, X)
    ids = jnp.where(pads[:, None], (IDS + 1) % E, IDS)
    y = run(WEIGHTS, x, ids, PROBS, method)
    if method == "ragged":  # on the CPU every row meets every expert, times zero
        y = run(WEIGHTS, jnp.where(pads[:, None], 1e3, X), ids, PROBS, method)
    np.testing.assert_allclose(y[~pads], clean[~pads], rtol=1e-6, atol=1e-6)
    nowhere = run(WEIGHTS, X, jnp.where(pads[:, None], E, IDS), PROBS, method)
    np.testing.assert_allclose(nowhere[~pads], clean[~pads], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(nowhere[pads], 0)


@pytest.mark.parametrize("method", ["gathered", "sorted"])
def test_experts_nobody_chose_are_not_touched(method):
    """Their weights are not numbers; whoever multiplies by them, by zero even, shows it."""
    ids = jnp.asarray(RNG.permuted(np.tile([[0, 2, 3]], (N, 1)), axis=1)[:, :K])
    unused = jnp.asarray([False, True, False, False, True])[:, None, None]
    poisoned = jax.tree.map(lambda t: jnp.where(unused, jnp.nan, t), WEIGHTS)
    y = run(poisoned, X, ids, PROBS, method)
    np.testing.assert_allclose(y, reference(WEIGHTS, X, ids, PROBS), atol=3e-6)
    lost = jax.tree.map(lambda t: jnp.full_like(t, jnp.nan), WEIGHTS)
    np.testing.assert_array_equal(run(lost, X, jnp.full((N, K), E), PROBS, method), 0)


def test_only_blocks_with_work_are_computed():
    calls = []

    def counting(gate):
        jax.debug.callback(lambda: calls.append(gate.shape[0]))
        return silu(gate)

    blocks = jax.jit(lambda ids: sorted_blocks(WEIGHTS, X, ids, PROBS, counting, rows=3))
    for ids in ROUTINGS.values():
        calls.clear()
        jax.block_until_ready(blocks(jnp.asarray(ids, jnp.int32)))
        jax.effects_barrier()
        sizes = np.bincount(np.asarray(ids).reshape(-1), minlength=E)[:E]
        assert calls == [3] * int(np.ceil(sizes / 3).sum())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [1, N])
def test_bfloat16(method, tokens):
    half = jax.tree.map(lambda t: t.astype(jnp.bfloat16), WEIGHTS)
    x = X[:tokens].astype(jnp.bfloat16)
    y = run(half, x, IDS[:tokens], PROBS[:tokens], method)
    assert y.dtype == jnp.bfloat16
    want = reference(half, x, IDS[:tokens], PROBS[:tokens])
    np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=0.02, atol=0.01)
    # Weights of another dtype are used as the tokens' dtype.
    mixed = run(half, x.astype(jnp.float32), IDS[:tokens], PROBS[:tokens], method)
    assert mixed.dtype == jnp.float32
    np.testing.assert_allclose(mixed, want, atol=5e-6)


@pytest.mark.parametrize("method", METHODS)
def test_sums_are_float32(method):
    """4096 ones, then 300 equal experts' outputs: bfloat16 sums would stop growing at 256."""
    one = functools.partial(jnp.ones, dtype=jnp.bfloat16)
    weights = ExpertWeights(one((1, 1, 4096)) / 4096, one((1, 1, 4096)), one((1, 4096, 1)))
    args = (one((2, 4096)), jnp.zeros((2, 300), jnp.int32), jnp.ones((2, 300)) / 4096)
    y = jax.jit(lambda *args: experts(weights, *args, lambda gate: gate, method=method))(*args)
    np.testing.assert_array_equal(y.astype(jnp.float32), 300)


def test_layers_of_stacked_tables():
    stacked, ids = tables(lead=(3,)), jnp.asarray(routing())
    one = [jax.tree.map(lambda t, i=i: t[i], stacked) for i in range(3)]
    want = np.stack([reference(w, X, ids, PROBS) for w in one])
    for method in METHODS:

        def step(_, layer, method=method):
            y = experts(stacked.at_layer(layer), X, ids, PROBS, silu, method=method)
            return None, y

        scanned = jax.jit(lambda: jax.lax.scan(step, None, jnp.arange(3))[1])()
        np.testing.assert_allclose(scanned, want, atol=3e-6)
    fixed = run(stacked.at_layer(2), X, ids, PROBS, "sorted")
    np.testing.assert_allclose(fixed, want[2], atol=3e-6)


def packed_table(kind, out, into):
    if kind == "int4":
        words = RNG.integers(-(2**31), 2**31, size=(E, out, into // 8)).astype(np.int32)
        scale = RNG.uniform(0.02, 0.05, size=(E, out, into // 32))
        return GroupInt4(jnp.asarray(words), jnp.asarray(scale, jnp.bfloat16))
    if kind == "fp8":
        values = RNG.integers(0, 0x40, size=(E, out, into)) | RNG.choice([0, 0x80], (E, out, into))
        scale = RNG.uniform(0.1, 0.3, size=(E, -(-out // 16), -(-into // 16)))
        scale = jnp.asarray(scale, jnp.float32)
        return BlockFp8(jnp.asarray(values, jnp.uint8), scale, (16, 16))
    values = jnp.asarray(RNG.integers(0, 256, size=(E, out, into // 2)), jnp.uint8)
    return Mxfp4(values, jnp.full((E, out, into // 32), 123, jnp.uint8))


@pytest.mark.parametrize("kind", ["int4", "fp8", "mxfp4"])
def test_packed_tables(kind):
    hidden, width = 64, 32
    packed = ExpertWeights(
        packed_table(kind, width, hidden),
        packed_table(kind, width, hidden),
        packed_table(kind, hidden, width),
    )
    unpack = jax.jit(lambda t: t.dequantise(jnp.float32))
    arrays = ExpertWeights(*(unpack(t) for t in (packed.gate, packed.up, packed.down)))
    x = jnp.asarray(RNG.normal(size=(N, hidden)), jnp.float32)
    want = reference(arrays, x, IDS, PROBS)
    assert np.abs(want).max() > 0.1
    two = jax.tree.map(lambda t: jnp.stack([jnp.zeros_like(t), t]), packed)
    for weights, method in ((packed, "gathered"), (two.at_layer(1), "sorted")):
        y = run(weights, x, IDS, PROBS, method)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="packed experts go by"):
        experts(packed, x, IDS, PROBS, silu, method="ragged")


def dense_formula(weights, x, probs, ids):
    """Compute every expert for every token; differentiable by plain rules."""
    gate, up = (jnp.einsum("nh,eih->nei", x, t, precision="highest") for t in
                (weights.gate, weights.up))  # fmt: skip
    y = jnp.einsum("nei,ehi->neh", silu(gate) * up, weights.down, precision="highest")
    share = (jax.nn.one_hot(ids, E) * probs[..., None]).sum(1)
    return jnp.einsum("neh,ne->nh", y, share, precision="highest")


@pytest.mark.parametrize("method", METHODS)
def test_gradients(method):
    pull = jnp.asarray(RNG.normal(size=(N, H)), jnp.float32)
    ids = jnp.asarray(ROUTINGS["some go nowhere"], jnp.int32)

    def loss(weights, x, probs):
        return (experts(weights, x, ids, probs, silu, method=method) * pull).sum()

    def plain(weights, x, probs):
        return (dense_formula(weights, x, probs, ids) * pull).sum()

    got, want = (jax.jit(jax.grad(f, (0, 1, 2)))(WEIGHTS, X, PROBS) for f in (loss, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)


def temporary(function, *args):
    """Bytes of temporaries of a compiled program."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize(("tokens", "scanned"), [(1, True), (8, True), (2, False)])
def test_in_a_decode_loop_few_experts_lie_unpacked_in_memory(tokens, kind, scanned):
    """XLA likes to convert or copy whole tables in front of a loop; the loop is what counts."""
    count, hidden, width, layers = 64, 64, 64, 2
    expert = 3 * hidden * width * 4  # bytes, as float32
    if kind == "int4":
        words = jnp.zeros((layers, count, hidden, width // 8), jnp.int32)
        table = GroupInt4(words, jnp.ones((layers, count, hidden, width // 32), jnp.bfloat16))
        weights, dtype = ExpertWeights(table, table, table), jnp.dtype("bfloat16")
    else:
        dtype = jnp.dtype(kind)
        weights = tables(count, hidden, width, (layers,), dtype)

    def layer(weights, x, ids, index):
        probs = jnp.full(ids.shape, 0.5)
        return experts(weights.at_layer(index), x, ids, probs, silu)

    def loop(weights, x, ids):
        def turn(carry):
            step, x = carry
            chosen = (ids + jnp.argmax(x).astype(jnp.int32)) % count  # the routing changes
            if scanned:
                body = lambda x, i: (layer(weights, x, chosen, i), None)  # noqa: E731
                return step + 1, jax.lax.scan(body, x, jnp.arange(layers))[0]
            for index in range(layers):
                x = layer(weights, x, chosen, index)
            return step + 1, x

        return jax.lax.while_loop(lambda carry: carry[0] < 4, turn, (0, x))[1]

    x, ids = jnp.ones((tokens, hidden), dtype), jnp.asarray(routing(count, tokens, 4))
    assert temporary(loop, weights, x, ids) < 6 * expert < count * expert / 10


def test_a_gradient_by_blocks_keeps_no_weights():
    count, hidden, width = 64, 64, 64
    weights, x = tables(count, hidden, width), jnp.ones((8, hidden))
    ids, probs = jnp.asarray(routing(count, 8, 4)), jnp.ones((8, 4))

    def loss(x, weights):
        return experts(weights, x, ids, probs, silu, method="sorted").sum()

    assert temporary(jax.grad(loss), x, weights) < 10 * 3 * hidden * width * 4


def test_what_auto_takes_by_platform():
    """Lowered for machines we do not have: grouped products on TPUs, gathers or blocks else."""

    def program(platform, tokens):
        x, ids = jnp.ones((tokens, H)), jnp.asarray(routing(E, tokens))
        lowered = jax.export.export(jax.jit(run, static_argnames="method"), platforms=[platform])
        return lowered(WEIGHTS, x, ids, jnp.ones(ids.shape), method="auto").mlir_module()

    for tokens in (1, 64):
        assert "ragged_dot" in program("tpu", tokens)
        for platform in ("cpu", "cuda", "rocm"):
            assert "ragged_dot" not in program(platform, tokens)
    assert "stablehlo.while" in program("cpu", 1)
    assert "stablehlo.while" not in program("cuda", 1)
    assert "stablehlo.while" in program("cuda", 64)


def test_unknown_method():
    with pytest.raises(ValueError, match="'fast'; have auto, gathered, sorted, ragged"):
        experts(WEIGHTS, X, IDS, PROBS, silu, method="fast")


def test_specs_name_every_published_tensor():
    specs = ExpertWeights.abstract(3, I, H, "model.layers.0.mlp.")
    named = dict(leaves_with_names(specs))
    assert [s.shape for s in named.values()] == [(3, I, H), (3, I, H), (3, H, I)]
    assert [s.axes for s in named.values()] == [
        ("experts", "mlp", "embed"), ("experts", "mlp", "embed"), ("experts", "embed", "mlp"),
    ]  # fmt: skip
    assert [part.hf for part in specs.down.published()] == [
        f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(3)
    ]
    prefix = "model.layers.1.block_sparse_moe."
    minimax = ExpertWeights.abstract(2, I, H, prefix, ("w1", "w3", "w2"))
    assert [part.hf for part in minimax.up.published()] == [
        f"{prefix}experts.{e}.w3.weight" for e in range(2)
    ]
    assert minimax.down.shape == (2, H, I)
    assert {f.name for f in dataclasses.fields(moe.ExpertWeights)} == {
        "gate",
        "up",
        "down",
        "layer",
    }
