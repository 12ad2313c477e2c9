"""Qwen3.5 against the reference's stored tensors and against transformers itself."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scripts.fixture_checks.targets import chunked, full_pass, greedy, padded
from specjax import targets
from specjax.core.errors import CheckpointError
from specjax.core.params import leaves_with_names
from specjax.layers.norm import offset_norm
from specjax.targets import TargetConfig

from .parity import FIXTURES, check_tap_map, tapped
from .reference_qwen3_5 import DENSE, SPARSE, write_checkpoint

NAMES = ("qwen3_5_vl_mtp", "qwen3_5_moe")  # a release, and a text-only save with experts


@pytest.mark.parametrize("name", NAMES)
def test_fixture_and_tap_map_f5(name):
    check_tap_map(name)


@pytest.mark.parametrize("loop", ["scan", pytest.param("unroll", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_fixture_in_both_layer_loops(name, loop):
    target, params, want = load_fixture(name, loop)
    got = full_pass(target, params, want["input_ids"])
    got["chunk_logits"] = chunked(target, params, want["input_ids"], 16)
    for tensor, value in got.items():
        np.testing.assert_allclose(value, want[tensor], atol=1e-4, err_msg=tensor)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["scan", "unroll"])
@pytest.mark.parametrize("name", NAMES)
def test_fixture_padded_and_decoded(name, loop):
    target, params, want = load_fixture(name, loop)
    mask = want["attention_mask"] != 0
    got = padded(target, params, want["padded_input_ids"], mask)
    np.testing.assert_allclose(
        got["padded_logits"], np.where(mask[..., None], want["padded_logits"], 0), atol=1e-4
    )
    got = greedy(target, params, want["greedy_prompt"], want["greedy_ids"].shape[1])
    np.testing.assert_array_equal(got["greedy_ids"], want["greedy_ids"])
    np.testing.assert_allclose(got["greedy_logits"], want["greedy_logits"], atol=1e-4)


def load_fixture(name, loop):
    target, params = targets.load(FIXTURES / name, how=TargetConfig(layer_loop=loop))
    want = load_file(FIXTURES / name / "expected.safetensors")
    ids = ("input_ids", "padded_input_ids", "greedy_prompt")
    return target, params, want | {name: want[name].astype(np.int32) for name in ids}


@pytest.mark.torch
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 13))]
)
def test_live_parity_on_random_configurations(sparse, seed, tmp_path):
    pytest.importorskip("torch")
    ids, logits, states = write_checkpoint(sparse, seed, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert ("rope_parameters" in fields) == (seed % 2 == 0)
    for loop in ("unroll", "scan"):
        target, params = targets.load(tmp_path, how=TargetConfig(layer_loop=loop))
        got_logits, got_states, _ = tapped(target, params, ids)
        for got, want in ((got_states, states), (got_logits, logits)):
            scale = max(1.0, np.abs(want).max())
            np.testing.assert_allclose(got, want, atol=1e-4 * scale)


def test_norms_keep_small_offsets_in_bfloat16():
    """1 + 0.003 is 1 in bfloat16; the published models multiply in float32."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 64)).astype(jnp.bfloat16)
    offset = np.full(64, 0.003, jnp.bfloat16)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    exact *= 1 + offset.astype(np.float64)
    got = np.asarray(offset_norm(jnp.asarray(x), jnp.asarray(offset), 1e-6))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(np.float32).astype(jnp.bfloat16))


def test_layers_and_tensors_are_those_of_the_release():
    target = targets.from_config(SPARSE)
    assert target.info.layer_kinds == ("recurrent",) * 3 + ("full",)
    shapes = {
        part.hf: part.shape for _, spec in leaves_with_names(target.specs())
        for part in spec.published()
    }  # fmt: skip
    at = "model.layers.3."
    assert shapes[f"{at}self_attn.q_proj.weight"] == (2 * 4 * 16, 32)  # queries and gates
    assert shapes[f"{at}self_attn.k_norm.weight"] == (16,)
    assert shapes[f"{at}mlp.shared_expert_gate.weight"] == (1, 32)
    assert shapes[f"{at}mlp.shared_expert.down_proj.weight"] == (32, 20)
    assert shapes[f"{at}mlp.experts.5.gate_proj.weight"] == (12, 32)
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (2 * 2 * 8 + 4 * 12, 1, 4)
    assert not any("self_attn" in name and ".3." not in name for name in shapes)


def test_a_wrapper_with_stacked_experts_is_the_same_model(tmp_path):
    """Releases: text under `model.language_model.`, the experts of a layer in two tensors."""
    plain = load_file(FIXTURES / "qwen3_5_moe" / "model.safetensors")
    config = json.loads((FIXTURES / "qwen3_5_moe" / "config.json").read_text())
    wrapped = {}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp.experts."
        e = range(config["num_experts"])
        gate, up, down = (
            np.stack([plain.pop(f"{at}{n}.{name}_proj.weight") for n in e])
            for name in ("gate", "up", "down")
        )
        plain[f"{at}gate_up_proj"], plain[f"{at}down_proj"] = np.concatenate([gate, up], 1), down
    for name, value in plain.items():
        wrapped[name.replace("model.", "model.language_model.", 1)] = value
    wrapped["mtp.fc.weight"] = np.zeros((3, 3), np.float32)
    wrapped["model.visual.patch_embed.proj.weight"] = np.zeros((3, 3), np.float32)
    save_file(wrapped, tmp_path / "model.safetensors")
    outer = {"model_type": "qwen3_5_moe", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    one, two = targets.load(FIXTURES / "qwen3_5_moe"), targets.load(tmp_path)
    assert one[0] == two[0] and hash(one[0]) == hash(two[0])
    jax.tree.map(np.testing.assert_array_equal, one[1], two[1])


def test_only_the_drafting_module_may_be_surplus(tmp_path):
    shutil.copytree(FIXTURES / "qwen3_5_moe", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    stray = "model.layers.0.self_attn.q_proj.weight"  # layer 0 is linear
    save_file(tensors | {stray: np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"surplus {stray}"):
        targets.load(tmp_path)


def test_both_spellings_of_layer_types_and_rope():
    listed = DENSE | {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]),
        "full_attention_interval": 2,  # the list says more
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "rope_type": "default"},
    }  # fmt: skip
    spelt = DENSE | {
        "full_attention_interval": 4, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    }  # fmt: skip
    assert targets.from_config(listed) == targets.from_config(spelt)
    by_two = targets.from_config(DENSE | {"full_attention_interval": 2})
    assert by_two.info.layer_kinds == ("recurrent", "full") * 2


def test_a_quarter_of_the_dims_turns_unless_told_otherwise_f10():
    """F10: heads built for the target turn the same dims."""
    target = targets.from_config(DENSE | {"head_dim": 256})
    rope = target.config.kinds[3].mixer.rope
    assert rope.dims == target.info.draft_block.rope.dims == 64
    assert targets.from_config(SPARSE).info.draft_block.mlp == 3 * 32
    assert targets.from_config(DENSE).info.draft_block.mlp == 40


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attn_output_gate": False}, "attn_output_gate False"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention'"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3"),
        ({"linear_key_head_dim": None}, "lacks linear_key_head_dim"),
        ({"num_experts": None, "moe_intermediate_size": None}, "lacks num_experts, moe_interm"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(changes, says):
    with pytest.raises(CheckpointError, match=says):
        targets.from_config(SPARSE | changes)
