"""Llama against the reference's stored tensors and against transformers itself."""

import pytest

from specjax import targets

from .parity import check_live, check_tap_map

CONFIG = {
    "model_type": "llama",
    "vocab_size": 33,
    "hidden_size": 64,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_fixture_and_tap_map_f5():
    check_tap_map("llama")


@pytest.mark.torch
@pytest.mark.parametrize(
    "seed", [0, 5, *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 18))]
)
def test_live_parity_on_random_configurations(seed, tmp_path):
    pytest.importorskip("torch")
    check_live("llama", seed, tmp_path)


def test_head_dim_is_read_not_derived_f14():
    derived = targets.from_config(CONFIG).specs().layers[0].attention
    assert derived.q.shape == (64, 64) and derived.k.shape == (64, 64)  # kv heads default to heads
    given = targets.from_config({**CONFIG, "head_dim": 32, "num_key_value_heads": 2})
    attention = given.specs().layers[0].attention
    assert attention.q.shape == (128, 64) and attention.k.shape == (64, 64)
    assert attention.o.shape == (64, 128)
    assert given.config.kinds[0].block.rope.dims == 32


@pytest.mark.parametrize("on", [False, True])
def test_biases_exist_exactly_where_asked_for(on):
    layer = targets.from_config({**CONFIG, "attention_bias": on, "mlp_bias": on}).specs().layers[0]
    biases = [getattr(layer.attention, f"{name}_bias") for name in "qkvo"]
    biases += [getattr(layer.mlp, f"{name}_bias") for name in ("gate", "up", "down")]
    assert all((bias is not None) == on for bias in biases)


def test_a_target_loaded_twice_is_the_same_static_argument():
    one, two = targets.from_config(CONFIG), targets.from_config(dict(CONFIG))
    assert one == two and hash(one) == hash(two)
    assert one != targets.from_config({**CONFIG, "rope_theta": 7.0})
