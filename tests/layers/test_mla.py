"""Latent attention: absorbed, cached and plain are one and the same."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import CheckpointError
from specjax.core.packed import BlockFp8
from specjax.core.params import init_params, leaves_with_names
from specjax.layers.attention import attend_with
from specjax.layers.context import Context
from specjax.layers.mla import MlaConfig, MlaWeights, mla

HIDDEN, HEADS, RANK, NOPE, ROPE, VALUE = 24, 3, 16, 12, 8, 10
BATCH, LENGTH = 2, 11
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
PUBLISHED = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "q_lora_rank": 20,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "rms_norm_eps": 0.5,  # the inner norms must not use it
    "rope_theta": 50.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 2560,
}
VARIANTS = {
    "published": {},
    "biases": {"attention_bias": True},
    "queries at once": {"q_lora_rank": None},
    "halves": {"rope_interleave": False},
    "unscaled": {"rope_scaling": None},
}


def drawn(config, seed=0):
    """Weights of a size at which attention is far from uniform, norms and biases too."""
    specs = MlaWeights.abstract(config, "")
    weights = init_params(specs, jax.random.key(seed), scale=0.3)
    noise = init_params(
        jax.tree.map(lambda s: dataclasses.replace(s, init="normal"), specs),
        jax.random.key(seed + 1),
        scale=0.1,
    )
    return jax.tree.map(lambda w, e: w + e, weights, noise)


def inputs(seed=2, length=LENGTH):
    x = np.random.default_rng(seed).normal(size=(BATCH, length, HIDDEN))
    return jnp.asarray(x, jnp.float32)


def run(weights, config, x, lengths=None, entry=None, valid=None, backend="blocks"):
    batch, length, _ = x.shape
    lengths = jnp.zeros(batch, int) if lengths is None else lengths
    valid = jnp.full(batch, length) if valid is None else valid
    ctx = Context.of(lengths, valid, length, [config.rope], attend_with(backend))
    return mla(weights, config, x, ctx, entry)


forward = jax.jit(run, static_argnames=("config", "backend"))


def reference(weights, published, x):
    """Every head's keys and values written out, position by position, in float64."""
    w = {k: np.asarray(v, np.float64) for k, v in vars(weights).items() if v is not None}
    x = np.asarray(x, np.float64)

    def norm(y, weight):
        return weight * y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)

    theta = published["rope_theta"] ** (-np.arange(ROPE // 2) / (ROPE // 2))
    scale = (NOPE + ROPE) ** -0.5
    if published["rope_scaling"]:

        def corner(turns):
            return ROPE * math.log(64 / (2 * math.pi * turns)) / (2 * math.log(50.0))

        low, high = max(math.floor(corner(32)), 0), min(math.ceil(corner(1)), ROPE - 1)
        ramp = np.clip((np.arange(ROPE // 2) - low) / (high - low), 0, 1)
        theta = theta * (1 - ramp + ramp / 40)
        scale *= (1 + 0.1 * math.log(40)) ** 2

    def turn(y):  # [..., T, ROPE]
        y = y.reshape(*y.shape[:-1], -1, 2) if interleaved else np.stack(np.split(y, 2, -1), -1)
        z = (y[..., 0] + 1j * y[..., 1]) * np.exp(1j * np.arange(y.shape[-3])[:, None] * theta)
        return np.concatenate([z.real, z.imag], -1)

    interleaved = published.get("rope_interleave", True)
    if "q" in w:
        q = x @ w["q"].T
    else:
        q = norm(x @ w["q_a"].T + w.get("q_a_bias", 0), w["q_a_norm"]) @ w["q_b"].T
    q = q.reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)
    both = x @ w["kv_a"].T + w.get("kv_a_bias", 0)
    kv = norm(both[..., :RANK], w["kv_a_norm"]) @ w["kv_b"].T
    kv = kv.reshape(*x.shape[:2], HEADS, NOPE + VALUE).transpose(0, 2, 1, 3)
    k = np.concatenate(
        [kv[..., :NOPE], np.repeat(turn(both[:, None, :, RANK:]), HEADS, axis=1)], axis=-1
    )
    q = np.concatenate([q[..., :NOPE], turn(q[..., NOPE:])], axis=-1)
    scores = q @ k.transpose(0, 1, 3, 2) * scale
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ kv[..., NOPE:]
    out = out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    return out @ w["o"].T + w.get("o_bias", 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_absorbed_equals_expanded(variant):
    published = {**PUBLISHED, **VARIANTS[variant]}
    config = MlaConfig.from_hf(published)
    weights, x = drawn(config), inputs()
    want = reference(weights, published, x)
    got, _ = forward(weights, config, x)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.std(want) > 0.3


@pytest.mark.parametrize("backend", ["blocks", "dot_product"])
def test_any_chunks_of_a_ragged_batch_equal_one_pass(backend):
    """Rows advance by different steps; what is rejected, and pads, hold other numbers."""
    config = MlaConfig.from_hf(PUBLISHED)
    weights, x = drawn(config), np.asarray(inputs())
    want, whole = (np.asarray(y) for y in forward(weights, config, x))
    rng, chunk = np.random.default_rng(3), 4
    write = jax.jit(config.cache.write)
    entry, lengths = config.cache.empty(BATCH, LENGTH, "float32"), np.zeros(BATCH, int)
    while lengths.min() < LENGTH:
        n = np.minimum(rng.integers(0, chunk + 1, BATCH), LENGTH - lengths)
        now = rng.normal(size=(BATCH, chunk, HIDDEN)).astype(np.float32)
        for b in range(BATCH):
            now[b, : n[b]] = x[b, lengths[b] : lengths[b] + n[b]]
        got, new = forward(weights, config, now, lengths, entry, valid=n, backend=backend)
        for b in range(BATCH):
            at = slice(lengths[b], lengths[b] + n[b])
            np.testing.assert_allclose(got[b, : n[b]], want[b, at], atol=1e-5)
        entry = write(entry, lengths, new, n)
        lengths = lengths + n
    np.testing.assert_allclose(entry.latent, whole, atol=2e-6)


def test_nothing_is_expanded_and_the_cache_is_not_copied():
    """A decode loop over a cache far larger than all else, in the compiled program."""
    config = MlaConfig.from_hf({**PUBLISHED, "num_attention_heads": 2})
    weights, capacity, length = drawn(config), 20000, 2
    entry = config.cache.empty(1, capacity, "float32")

    def decode(weights, entry, x):
        def body(state):
            entry, lengths, x = state
            y, new = run(weights, config, x, lengths, entry)
            n = jnp.where(y[:, 0, 0] < -1e30, 0, length)  # depends on the last read, as it does
            return config.cache.write(entry, lengths, new, n), lengths + n, y

        return jax.lax.while_loop(
            lambda state: state[1][0] < capacity, body, (entry, jnp.zeros(1, int), x)
        )

    compiled = jax.jit(decode, donate_argnums=1).lower(weights, entry, inputs(length=length)[:1])
    scores = 2 * length * capacity * 4
    extra = compiled.compile().memory_analysis().temp_size_in_bytes
    assert extra < entry.latent.nbytes / 2 + scores, (extra, entry.latent.nbytes, scores)


@pytest.mark.parametrize("length", [1, 3])
def test_bfloat16_is_near_float32(length):
    """One token is a case of its own: its row is doubled."""
    config = MlaConfig.from_hf(PUBLISHED)
    weights = drawn(config)
    small = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    x = inputs(length=length)[:1]
    got, new = forward(small, config, x.astype(jnp.bfloat16))
    want, _ = forward(jax.tree.map(lambda w: w.astype(jnp.float32), small), config, x)
    assert got.dtype == new.dtype == jnp.bfloat16 and got.shape == x.shape
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.05 * float(jnp.std(want)) * 3)


def test_a_packed_projection_is_unpacked_on_the_way():
    config = MlaConfig.from_hf(PUBLISHED)
    weights = drawn(config)
    values = weights.kv_b.astype(jnp.float8_e4m3fn)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8)
    scale = jnp.full((math.ceil(values.shape[0] / 8), RANK // 8), 1.5, jnp.float32)
    packed = dataclasses.replace(weights, kv_b=BlockFp8(bits, scale, block=(8, 8)))
    plain = dataclasses.replace(weights, kv_b=values.astype(jnp.float32) * 1.5)
    got, want = (forward(w, config, inputs())[0] for w in (packed, plain))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_gradient_reaches_the_input():
    config = MlaConfig.from_hf(PUBLISHED)
    weights, x, step = drawn(config), inputs(length=3), inputs(seed=5, length=3)

    @jax.jit
    def total(x):
        return jnp.sum(run(weights, config, x)[0] * step)

    slope = float(jnp.sum(jax.grad(total)(x) * step))
    with_step = [reference(weights, PUBLISHED, np.float64(x) + e * step) for e in (1e-4, -1e-4)]
    want = ((with_step[0] - with_step[1]) * np.float64(step)).sum() / 2e-4
    assert slope == pytest.approx(want, rel=1e-3)


def test_the_configuration_as_published():
    config = MlaConfig.from_hf(PUBLISHED)
    assert config.scale == pytest.approx(20**-0.5 * (1 + 0.1 * math.log(40)) ** 2)
    assert config.interleaved and not config.attention_bias and config.eps == 0.5
    assert (config.cache.rank, config.cache.rope_dim) == (RANK, ROPE)
    plain = MlaConfig.from_hf({**PUBLISHED, "rope_scaling": None, "q_lora_rank": None})
    assert plain.scale == pytest.approx(20**-0.5) and plain.q_rank is None
    with pytest.raises(CheckpointError, match=r"lacks kv_lora_rank, v_head_dim"):
        MlaConfig.from_hf({**PUBLISHED, "kv_lora_rank": None, "v_head_dim": None})


@pytest.mark.torch
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_numbers_are_those_of_transformers(variant):
    import torch
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    published = {**PUBLISHED, **VARIANTS[variant], "num_key_value_heads": HEADS}
    reference_config = DeepseekV3Config(**{**published, "attn_implementation": "eager"})
    module = theirs.DeepseekV3Attention(reference_config, 0)
    config = MlaConfig.from_hf(published)
    weights = drawn(config)
    specs = leaves_with_names(MlaWeights.abstract(config, ""))
    state = {
        spec.hf: torch.tensor(np.asarray(w))
        for (_, spec), w in zip(specs, jax.tree.leaves(weights), strict=True)
    }
    module.load_state_dict(state, strict=True)
    x = torch.tensor(np.asarray(inputs()))
    rope = theirs.DeepseekV3RotaryEmbedding(reference_config)
    hidden = torch.triu(torch.full((LENGTH, LENGTH), -1e30), 1)[None, None]
    with torch.no_grad():
        want = module(x, rope(x, torch.arange(LENGTH)[None]), hidden)[0].numpy()
    got, _ = forward(weights, config, inputs())
    np.testing.assert_allclose(got, want, atol=3e-5)
