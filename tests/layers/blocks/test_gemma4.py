"""Gemma 4's layers against their formulas in float64, and as an assistant would use them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import CheckpointError
from specjax.core.params import map_specs
from specjax.layers.attention import KeyBlock, attend
from specjax.layers.blocks.gemma4 import (
    Gemma4Attention,
    Gemma4Layer,
    finish,
    mix,
    project_keys,
    project_queries,
)
from specjax.layers.blocks.gemma4_config import read_layers
from specjax.layers.blocks.gemma4_moe import SparseBranch, router_logits
from specjax.layers.context import Context
from specjax.layers.norm import rms_norm
from specjax.layers.rope import RopeConfig, rope_tables
from specjax.layers.router import RouterConfig

HIDDEN, HEADS, KV, DIM, EPS, LENGTH = 12, 4, 2, 8, 1e-6, 7
FULL = Gemma4Attention(
    HIDDEN, HEADS, KV, DIM, EPS,
    RopeConfig(1e3, DIM, "proportional", (("factor", 1.0), ("partial_rotary_factor", 0.5))),
    value_is_key=True, bias=True,
)  # fmt: skip
SLIDING = Gemma4Attention(HIDDEN, HEADS, KV, DIM, EPS, RopeConfig(1e2, DIM), window=3)
SPARSE = SparseBranch(HIDDEN, 5, RouterConfig(6, 2, "softmax"), EPS)
LAYERS = {
    "sliding": Gemma4Layer(SLIDING, 10),
    "full": Gemma4Layer(FULL, 10, inputs=4),
    "sparse": Gemma4Layer(FULL, 10, sparse=SPARSE),
}


def draw(layer, seed=0):
    rng = np.random.default_rng(seed)

    def one(spec):
        return jnp.asarray(rng.normal(float(spec.init == "ones"), 0.4, spec.shape), jnp.float32)

    return map_specs(one, layer.abstract("model.layers.3."))


def wide(tree):
    return np.asarray(tree, np.float64)


def norm(x, weight=None):
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return y if weight is None else y * wide(weight)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def turn(x, rope, positions):
    """Half-split over the whole head; of a proportional rope, the slow pairs stand still."""
    half = DIM // 2
    share = dict(rope.scaling).get("partial_rotary_factor", 1.0)
    inv = np.where(np.arange(half) < int(share * half), rope.theta ** (-np.arange(half) / half), 0)
    cos, sin = np.cos(positions[:, None] * inv), np.sin(positions[:, None] * inv)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def project(x, w, bias):
    y = x @ wide(w).T + (0 if bias is None else wide(bias))
    return y.reshape(len(x), -1, DIM).transpose(1, 0, 2)


def attend_to(q, k, v, seen):
    """One row: q `[M, T, D]`, k and v `[N, S, D]`, scores unscaled."""
    k, v = (np.repeat(y, HEADS // KV, 0) for y in (k, v))
    scores = np.where(seen, q @ k.transpose(0, 2, 1), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (
        ((weights / weights.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(len(seen), -1)
    )


def keys_values(w, config, x, positions):
    raw = project(x, w.k, w.k_bias)
    v = raw if config.value_is_key else project(x, w.v, w.v_bias)
    return turn(norm(raw, w.k_norm), config.rope, positions), norm(v)


def query_layer(w, layer, x, k, v, seen, positions, inputs=None):
    """The whole layer for one row, given the keys and values that it sees."""
    a = w.attention
    q = turn(
        norm(project(norm(x, w.input_norm), a.q, a.q_bias), a.q_norm),
        layer.attention.rope,
        positions,
    )
    y = attend_to(q, k, v, seen) @ wide(a.o).T + (0 if a.o_bias is None else wide(a.o_bias))
    x = x + norm(y, w.post_attention_norm)

    def mlp(y, weights):
        gate, up, down = (wide(getattr(weights, n)) for n in ("gate", "up", "down"))
        return (gelu(y @ gate.T) * (y @ up.T)) @ down.T

    y = mlp(norm(x, w.pre_mlp_norm), w.mlp)
    if layer.sparse is not None:
        s = w.sparse
        logits = norm(x) * wide(s.scale) * HIDDEN**-0.5 @ wide(s.gate).T
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        mixed = np.zeros_like(x)
        for t, row in enumerate(norm(x, s.pre_norm)):
            best = np.argsort(-p[t])[: layer.sparse.router.top_k]
            for e in best:
                expert = dataclasses.replace(
                    w.mlp, gate=s.experts.gate[e], up=s.experts.up[e], down=s.experts.down[e]
                )
                mixed[t] += p[t, e] / p[t, best].sum() * wide(s.expert_scale)[e] * mlp(row, expert)
        y = norm(y, s.dense_norm) + norm(mixed, s.post_norm)
    x = x + norm(y, w.post_mlp_norm)
    if inputs is not None:
        own = w.inputs
        x = x + norm((gelu(x @ wide(own.gate).T) * inputs) @ wide(own.up).T, own.norm)
    return x * wide(w.scalar)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_formula(name):
    layer, rng, at = LAYERS[name], np.random.default_rng(1), np.arange(LENGTH)
    weights, config = draw(layer), layer.attention
    x = rng.normal(size=(2, LENGTH, HIDDEN)).astype(np.float32)
    inputs = rng.normal(size=(2, LENGTH, 5, layer.inputs)).astype(np.float32)
    start = jnp.zeros(2, jnp.int32)
    ctx = Context.of(start, start + LENGTH, LENGTH, layer.ropes)
    ctx = dataclasses.replace(ctx, extra=jnp.asarray(inputs))
    got, (k, v) = layer.run(weights, jnp.asarray(x), ctx, None, 3)
    back = at[:, None] - at
    seen = (back >= 0) & (back < (config.window or LENGTH))
    for b in range(2):
        keys = keys_values(weights.attention, config, norm(x[b], weights.input_norm), at)
        np.testing.assert_allclose(k[b], keys[0], atol=1e-5)
        np.testing.assert_allclose(v[b], keys[1], atol=1e-5)
        own = inputs[b, :, 3] if layer.inputs else None
        want = query_layer(weights, layer, wide(x[b]), *keys, seen, at, own)
        np.testing.assert_allclose(got[b], want, atol=2e-5)


@pytest.mark.parametrize("name", ["sliding", "full"])
def test_a_layer_without_keys_asks_those_it_is_given(name):
    """As an assistant does: one query, a position of its choice, any keys, no causal mask."""
    layer = dataclasses.replace(
        LAYERS[name], attention=dataclasses.replace(LAYERS[name].attention, shared=True), inputs=0
    )
    weights, config, rng = draw(layer, 2), layer.attention, np.random.default_rng(3)
    assert (weights.attention.k, weights.attention.v, weights.attention.k_norm) == (None,) * 3
    assert layer.cache is None and layer.label == name
    x = rng.normal(size=(2, 1, HIDDEN)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, KV, 9, DIM)).astype(np.float32)
    seen, at = np.array([[1] * 9, [0, 0, 1, 1, 1, 1, 0, 0, 0]], bool), np.array([9, 6])
    tables = rope_tables(config.rope, jnp.asarray(at)[:, None])
    normed = rms_norm(jnp.asarray(x), weights.input_norm, EPS)
    q = project_queries(weights.attention, config, normed, *tables)
    block = KeyBlock(jnp.asarray(k), jnp.asarray(v), jnp.asarray(seen)[:, None])
    got = finish(weights, layer, jnp.asarray(x), mix(weights.attention, q, [block], attend))
    for b in range(2):
        want = query_layer(weights, layer, wide(x[b]), k[b], v[b], seen[b][None], at[b : b + 1])
        np.testing.assert_allclose(got[b], want, atol=2e-5)


def test_the_router_computes_in_float32():
    """A stream in bfloat16 is widened first: rounding would move near-ties."""
    weights = draw(LAYERS["sparse"])
    x = jnp.asarray(np.random.default_rng(4).normal(size=(9, HIDDEN)), jnp.bfloat16)
    got = router_logits(weights.sparse, SPARSE, x)
    scaled = norm(wide(x)) * wide(weights.sparse.scale) * HIDDEN**-0.5
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, scaled @ wide(weights.sparse.gate).T, atol=1e-5)


def test_values_get_no_weight_and_no_rope():
    weights = draw(LAYERS["sliding"]).attention
    x = jnp.asarray(np.random.default_rng(5).normal(size=(1, 3, HIDDEN)), jnp.float32)
    pairs = [
        project_keys(weights, SLIDING, x, *rope_tables(SLIDING.rope, jnp.full((1, 3), at)))
        for at in (0, 50)
    ]
    np.testing.assert_array_equal(pairs[0][1], pairs[1][1])
    assert np.abs(pairs[0][0] - pairs[1][0]).max() > 0.1
    np.testing.assert_allclose((pairs[0][1] ** 2).mean(-1), 1, atol=1e-5)


def test_all_layers_of_an_assistant_are_without_keys():
    config = {
        "hidden_size": HIDDEN, "intermediate_size": 10, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
        "global_head_dim": 16, "sliding_window": 3, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e3},
        },
    }  # fmt: skip
    layers = read_layers(config)
    assert [layer.cache for layer in layers] == [None, None]
    assert [layer.attention.keys.name for layer in layers] == ["window", "full"]
    with pytest.raises(CheckpointError, match="2 layer_types for 3 layers"):
        read_layers(config | {"num_hidden_layers": 3})
