"""Qwen3 against the reference's stored tensors and against transformers itself."""

import pytest

from specjax import targets

from .parity import check_live, check_tap_map


def test_fixture_and_tap_map_f5():
    check_tap_map("qwen3")


@pytest.mark.torch
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (0, *range(2, 13)))]
)
def test_live_parity_on_random_configurations(seed, tmp_path):
    pytest.importorskip("torch")
    check_live("qwen3", seed, tmp_path)


def test_it_is_llama_with_a_norm_per_head():
    config = {
        "model_type": "qwen3",
        "vocab_size": 33,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "head_dim": 6,
    }
    attention = targets.from_config(config).specs().layers[0].attention
    assert attention.q_norm.shape == attention.k_norm.shape == (6,)
    assert attention.q_norm.hf == "model.layers.0.self_attn.q_norm.weight"
    plain = targets.from_config({**config, "model_type": "llama"}).specs().layers[0].attention
    assert plain.q_norm is None and plain.k_norm is None
