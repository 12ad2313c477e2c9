"""Qwen3-MoE: fixture, live parity with transformers, which layers have experts, refusals."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import targets
from specjax.core.errors import CheckpointError
from specjax.core.params import leaves_with_names

from .parity import FIXTURES, check_tap_map
from .reference_sparse import check_live, check_padded_and_decoded, check_passes

NAME = "qwen3_moe"
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}


def test_fixture_and_tap_map_f5():
    check_tap_map(NAME)


@pytest.mark.parametrize("loop", ["scan", pytest.param("unroll", marks=pytest.mark.slow)])
def test_fixture_in_both_layer_loops(loop):
    check_passes(NAME, loop)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_fixture_padded_and_decoded(loop):
    check_padded_and_decoded(NAME, loop)


@pytest.mark.torch
@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(s, marks=pytest.mark.slow) for s in (0, 1, 2, *range(4, 13)))]
)
def test_live_parity_on_random_configurations(seed, tmp_path):
    pytest.importorskip("torch")
    check_live("qwen3_moe", seed, tmp_path)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 3}, [2, 5]),
        ({"mlp_only_layers": [0, 4]}, [1, 2, 3, 5]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [3, 5]),
    ],
)
def test_which_layers_have_experts(changes, sparse):
    specs = targets.from_config(CONFIG | changes).specs()
    shapes = {
        part.hf: part.shape for _, spec in leaves_with_names(specs) for part in spec.published()
    }
    for i in range(6):
        at = f"model.layers.{i}.mlp."
        assert shapes.get(f"{at}experts.4.down_proj.weight") == ((24, 12) if i in sparse else None)
        assert shapes.get(f"{at}gate.weight") == ((5, 24) if i in sparse else None)
        assert shapes.get(f"{at}down_proj.weight") == (None if i in sparse else (24, 20))
    # Norms per head, as in Qwen3.
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (8,)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": None}, r"lacks num_experts \(or num_local_experts\)"),
        ({"num_experts": 0}, "lacks num_experts"),
        ({"num_experts_per_tok": None}, "lacks num_experts_per_tok"),
        ({"num_experts_per_tok": 6}, "top_k 6 of 5 experts"),
        ({"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"num_key_value_heads": 3}, "4 heads do not divide over 3"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(changes, says):
    with pytest.raises(CheckpointError, match=says) as refused:
        targets.from_config(CONFIG | changes)
    assert "\n" not in str(refused.value)


def test_both_spellings_of_the_number_of_experts():
    other = {name: value for name, value in CONFIG.items() if name != "num_experts"}
    assert targets.from_config(CONFIG) == targets.from_config(other | {"num_local_experts": 5})


def test_an_unknown_model_type_lists_the_known_ones():
    with pytest.raises(CheckpointError, match="model_type 'qwen3_mob' is not supported") as refused:
        targets.from_config(CONFIG | {"model_type": "qwen3_mob"})
    for known in targets.FAMILIES:
        assert known in str(refused.value)
    assert {"qwen3_moe", "deepseek_v3", "kimi_k2", "minimax_m2"} <= set(targets.FAMILIES)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("moe_intermediate_size", 20, r"experts\.0\.gate_proj\.weight has shape \(16, 32\), the "),
        ("num_local_experts", 9, r"missing model\.layers\.0\.mlp\.experts\.8\.gate_proj\.weight"),
        ("num_local_experts", 7, r"surplus model\.layers\.0\.mlp\.experts\.7\.down_proj\.weight"),
        ("head_dim", 8, r"q_proj\.weight has shape \(64, 32\), the configuration asks"),
        ("mlp_only_layers", [1], r"missing model\.layers\.1\.mlp\.gate_proj\.weight \(64, 32\)"),
        ("attention_bias", True, r"missing model\.layers\.0\.self_attn\.q_proj\.bias \(64,\)"),
        ("tie_word_embeddings", True, None),
    ],
)
def test_a_configuration_that_contradicts_the_tensors(tmp_path, field, value, says):
    shutil.copytree(FIXTURES / NAME, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    if says is None:  # a copy of the embedding may stand in a tied checkpoint
        assert targets.load(tmp_path)[1].output is None
        return
    with pytest.raises(CheckpointError, match=says) as refused:
        targets.load(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_missing_expert_is_named(tmp_path):
    shutil.copytree(FIXTURES / NAME, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    says = r"1 tensors do not fit: missing model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight \(16,"
    with pytest.raises(CheckpointError, match=says):
        targets.load(tmp_path)


def test_a_missing_shard_of_experts_is_named(tmp_path):
    """Published checkpoints come in many files; one that is not there is told before reading."""
    shutil.copy(FIXTURES / NAME / "config.json", tmp_path)
    tensors = load_file(FIXTURES / NAME / "model.safetensors")
    last = {n: t for n, t in tensors.items() if ".experts.7." in n}
    first = {n: t for n, t in tensors.items() if n not in last}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": last}
    index = {name: file for file, part in files.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for file, part in files.items():
        save_file(part, tmp_path / file)
    sharded, whole = targets.load(tmp_path)[1], targets.load(FIXTURES / NAME)[1]
    np.testing.assert_array_equal(
        sharded.layers[2].sparse.experts.down, whole.layers[2].sparse.experts.down
    )
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index names model-00002-of-00002\.safetensors"):
        targets.load(tmp_path)
