"""Rotary embeddings: spellings, scalings, and what a turn keeps."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import CheckpointError
from specjax.layers.rope import (
    RopeConfig,
    apply_rope,
    apply_rope_interleaved,
    inverse_frequencies,
    rope_tables,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BY_TYPE = {  # Gemma 4
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["default", "llama3", "yarn", "linear"])
def test_both_published_spellings_mean_the_same(scaling):
    new = {"rope_parameters": {"rope_theta": 5e4, **(scaling or {"rope_type": "default"})}}
    old = {"rope_theta": 5e4, "rope_scaling": scaling}
    older = dict(old)
    if scaling:
        older["rope_scaling"] = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    read = [RopeConfig.from_hf(config, 16) for config in (new, old, older)]
    assert read[0] == read[1] == read[2]
    assert read[0].theta == 5e4 and read[0].kind == (scaling or {}).get("rope_type", "default")


def test_theta_defaults_and_partial_rotation():
    assert RopeConfig.from_hf({}, 16) == RopeConfig(theta=10000.0, dims=16)
    assert RopeConfig.from_hf({"partial_rotary_factor": 0.25}, 16).dims == 4
    assert RopeConfig.from_hf({"rope_parameters": {"partial_rotary_factor": 0.5}}, 16).dims == 8
    assert RopeConfig.from_hf({"rotary_dim": 6}, 16).dims == 6


def test_minimax_names_the_dims_themselves():
    config = {"rotary_dim": 64, "head_dim": 128, "rope_theta": 5e6}
    assert RopeConfig.from_hf(config, 128) == RopeConfig(theta=5e6, dims=64)
    saved = {"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    assert RopeConfig.from_hf(saved, 128) == RopeConfig(theta=5e6, dims=64)


def test_layer_types_have_ropes_of_their_own():
    config = {"rope_parameters": BY_TYPE}
    sliding = RopeConfig.from_hf(config, 8, layer_type="sliding_attention")
    assert sliding == RopeConfig(theta=1e4, dims=8)
    full = RopeConfig.from_hf(config, 16, layer_type="full_attention")
    assert (full.theta, full.dims, full.kind) == (1e6, 16, "proportional")
    alike = {"rope_parameters": {"rope_theta": 3.0}}
    assert RopeConfig.from_hf(alike, 8, layer_type="full_attention").theta == 3.0
    with pytest.raises(
        CheckpointError, match=r"by layer type \(full_attention, sliding_attention\)"
    ):
        RopeConfig.from_hf(config, 8)
    with pytest.raises(CheckpointError, match=r"lack 'chunked'; have full_attention, sliding"):
        RopeConfig.from_hf(config, 8, layer_type="chunked")


def test_dims_that_make_no_pairs_are_refused():
    for partial, dims in ((0.3, 3), (0.0, 0), (2.0, 20)):
        with pytest.raises(CheckpointError, match=rf"cannot turn {dims} of 10 dims of a head"):
            RopeConfig.from_hf({"partial_rotary_factor": partial}, 10)


def test_proportional_frequencies_by_hand():
    """Head of 16, a quarter of it: two pairs turn, (0, 8) and (1, 9); exponents over the head."""
    config = RopeConfig.from_hf({"rope_parameters": BY_TYPE}, 16, layer_type="full_attention")
    inv, factor = inverse_frequencies(config)
    np.testing.assert_allclose(inv, [1, 1e6 ** (-1 / 8), 0, 0, 0, 0, 0, 0], rtol=1e-6)
    assert factor == 1.0
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 1, 16)), jnp.float32)
    turned = apply_rope(x, *rope_tables(config, jnp.full((1, 1), 3)))
    changed = np.flatnonzero(np.asarray(turned != x))
    assert changed.tolist() == [0, 1, 8, 9]


def test_unknown_type_and_missing_factor_are_named():
    with pytest.raises(CheckpointError, match=r"rope type 'longrope' is not supported; have def"):
        RopeConfig.from_hf({"rope_scaling": {"type": "longrope", "factor": 2.0}}, 16)
    with pytest.raises(CheckpointError, match=r"rope type 'yarn' needs a 'factor'"):
        RopeConfig.from_hf({"rope_scaling": {"type": "yarn"}}, 16)


def frequencies(scaling, theta=1e4, dims=16):
    config = RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": scaling}, dims)
    return inverse_frequencies(config)


def test_llama3_keeps_fast_frequencies_and_slows_the_slow_ones():
    inv, factor = frequencies(LLAMA3)
    base, _ = frequencies(None)
    wave = 2 * math.pi / base
    assert factor == 1.0
    fast, slow = wave < 64 / 4, wave > 64
    np.testing.assert_array_equal(inv[fast], base[fast])
    np.testing.assert_allclose(inv[slow], base[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    assert fast.any() and slow.any() and between.any()
    assert np.all((inv[between] < base[between]) & (inv[between] > base[between] / 8))


def test_yarn_by_hand():
    """theta 1e4, r 16, L 64: c(32) < 0, so lo = 0; c(1) = 2.02, so hi = 3."""
    inv, factor = frequencies(YARN)
    base, _ = frequencies(None)
    ramp = np.clip(np.arange(8) / 3, 0, 1)
    np.testing.assert_allclose(inv, base * (1 - ramp + ramp / 4), rtol=1e-6)
    assert factor == pytest.approx(1 + 0.1 * math.log(4))
    assert frequencies({**YARN, "attention_factor": 1.5})[1] == 1.5
    both = {**YARN, "mscale": 0.5, "mscale_all_dim": 2.0}
    assert frequencies(both)[1] == pytest.approx((1 + 0.05 * math.log(4)) / (1 + 0.2 * math.log(4)))


def test_yarn_without_truncation_keeps_the_exact_bounds():
    inv, _ = frequencies({**YARN, "truncate": False})
    base, _ = frequencies(None)
    high = 16 * math.log(64 / (2 * math.pi)) / (2 * math.log(1e4))
    ramp = np.clip(np.arange(8) / high, 0, 1)
    np.testing.assert_allclose(inv, base * (1 - ramp + ramp / 4), rtol=1e-6)


def test_turning_is_a_rotation_that_leaves_the_rest_alone():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 10)), jnp.float32)
    config = RopeConfig(theta=100.0, dims=6)
    positions = jnp.asarray(rng.integers(0, 1000, (2, 4)))
    turned = apply_rope(x, *rope_tables(config, positions))
    np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])
    np.testing.assert_allclose(
        np.hypot(turned[..., :3], turned[..., 3:6]), np.hypot(x[..., :3], x[..., 3:6]), rtol=1e-5
    )
    still = apply_rope(x, *rope_tables(config, jnp.zeros((2, 4), int)))
    np.testing.assert_array_equal(still, x)


def test_interleaved_pairs_turn_as_complex_numbers():
    """Of 8 dims the first 6 turn; results come as first halves, second halves, rest."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
    config, positions = RopeConfig(theta=100.0, dims=6), rng.integers(0, 1000, (2, 4))
    got = apply_rope_interleaved(jnp.asarray(x), *rope_tables(config, jnp.asarray(positions)))
    pairs = x[..., 0:6:2].astype(np.float64) + 1j * x[..., 1:6:2]
    angles = positions[:, None, :, None] * 100.0 ** (-np.arange(3) / 3)
    want = pairs * np.exp(1j * angles)
    want = np.concatenate([want.real, want.imag, x[..., 6:]], axis=-1)
    np.testing.assert_allclose(got, want, atol=2e-4)  # angles of 1000 in float32


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = jnp.asarray(rng.normal(size=(2, 1, 1, 1, 8)), jnp.float32)
    config = RopeConfig(theta=10.0, dims=8)

    def score(i, j):
        at = [rope_tables(config, jnp.full((1, 1), p)) for p in (i, j)]
        return float(jnp.sum(apply_rope(q, *at[0]) * apply_rope(k, *at[1])))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(3, 7), abs=1e-2)


SCALED = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with its own factor": {**YARN, "attention_factor": 1.3},
    "yarn with two scales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 4.0},
    "yarn with equal scales": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn with one scale": {**YARN, "mscale": 0.7},
    "yarn not rounded": {**YARN, "truncate": False},
    "partial": {**YARN, "partial_rotary_factor": 0.5},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    "proportional, all": {"rope_type": "proportional"},
    "proportional, slowed": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
    },
}


@pytest.mark.torch
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("theta", [50.0, 1e6])
def test_frequencies_are_those_of_transformers(name, theta):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    published = {"rope_theta": theta, **SCALED[name]}
    reference = LlamaConfig(
        head_dim=32, max_position_embeddings=256, rope_parameters=dict(published)
    )
    want, want_factor = ROPE_INIT_FUNCTIONS[published["rope_type"]](reference)
    config = {"rope_parameters": published, "max_position_embeddings": 256}
    inv, factor = inverse_frequencies(RopeConfig.from_hf(config, 32))
    np.testing.assert_allclose(inv, want.numpy(), rtol=2e-6)
    assert factor == pytest.approx(want_factor, rel=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("layer_type", BY_TYPE)
def test_gemma4_ropes_are_those_of_transformers(layer_type):
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    sizes = {"sliding_attention": 8, "full_attention": 16}
    published = {
        "rope_parameters": {key: dict(value) for key, value in BY_TYPE.items()},
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 8,
        "global_head_dim": 16,
        "num_hidden_layers": 2,
    }
    module = Gemma4TextRotaryEmbedding(Gemma4TextConfig(**published))
    config = RopeConfig.from_hf(published, sizes[layer_type], layer_type=layer_type)
    want = getattr(module, f"{layer_type}_inv_freq").numpy()
    np.testing.assert_allclose(inverse_frequencies(config)[0], want, rtol=1e-6)
