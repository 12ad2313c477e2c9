"""DeepSeek-V3 and Kimi-K2.5: fixture, live parity, small caches, int4 experts, refusals."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import targets
from specjax.core.errors import CheckpointError
from specjax.core.packed import GroupInt4
from specjax.core.params import leaves_with_names
from specjax.io.quant import dequantise_tree
from specjax.targets import TargetConfig
from specjax.targets.describe import describe

from .parity import FIXTURES, check_tap_map
from .reference_sparse import check_live, check_padded_and_decoded, check_passes

NAME = "kimi_k25"  # a release's layout: a wrapper with a tower, names under `language_model.`
CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 9,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "routed_scaling_factor": 2.5,
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
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 13))]
)
def test_live_parity_on_random_configurations(seed, tmp_path):
    pytest.importorskip("torch")
    check_live("deepseek_v3", seed, tmp_path)


@pytest.mark.parametrize("loop", ["unroll", "scan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cached_token_is_its_latent_and_rope_key(loop, dtype):
    """16 + 8 numbers per layer; expanded keys and values would be 2 * (12 + 8 + 10)."""
    target = targets.from_config(CONFIG, TargetConfig(layer_loop=loop))
    cache = jax.eval_shape(lambda: target.init_cache(3, 20, dtype))
    entries = jax.tree.leaves(cache.layers)
    assert all(entry.shape[-3:] == (3, 20, 16 + 8) for entry in entries)
    size = sum(entry.size * entry.dtype.itemsize for entry in entries)
    assert size == 9 * 3 * 20 * (16 + 8) * np.dtype(entries[0].dtype).itemsize
    assert entries[0].dtype == dtype
    for kind in target.config.kinds:
        assert kind.cache.bytes_per_token(entries[0].dtype.itemsize) * 9 * 60 == size
    assert target.info.layer_kinds == ("latent",) * 9


def test_the_cache_of_a_release_takes_70_kb_per_token():
    """DeepSeek-V3: 61 layers of 512 + 64 numbers in bfloat16."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    config = CONFIG | sizes
    record = describe("a release", targets.from_config(config), config)
    assert record.cache_per_token == 61 * (512 + 64) * 2 == 70272


@pytest.mark.parametrize(("v_dim", "turned"), [(10, 10), (9, 8)])
def test_heads_turn_as_fast_as_the_target_in_both_spellings(v_dim, turned):
    """Draft heads are as wide as values; an odd width of those is no reason not to load."""
    sizes = CONFIG | {"v_head_dim": v_dim}
    stretch = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    new = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    for spelt in (new, {"rope_theta": 500.0}, {"rope_theta": 500.0, "rope_scaling": stretch}):
        draft = targets.from_config(sizes | spelt).info.draft_block
        assert (draft.head_dim, draft.rope.dims, draft.rope.theta) == (v_dim, turned, 500.0)
        assert draft.rope.kind == "default"


def write(path, config, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def mtp_tensors(layer):
    """A few of an MTP module's tensors, of any shape: nobody reads them."""
    at = f"language_model.model.layers.{layer}."
    names = ("eh_proj", "enorm", "shared_head.norm", "mlp.experts.0.up_proj", "self_attn.o_proj")
    return {f"{at}{name}.weight": np.zeros((2, 2), np.float32) for name in names}


@pytest.mark.parametrize(
    ("modules", "layers", "surplus"),
    [(1, [3], None), (2, [3, 4], None), (0, [3], "3"), (1, [3, 4], "4"), (1, [30], "30")],
)
def test_only_declared_mtp_modules_may_be_surplus(tmp_path, modules, layers, surplus):
    config = json.loads((FIXTURES / NAME / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = modules
    tensors = load_file(FIXTURES / NAME / "model.safetensors")
    for layer in layers:
        tensors |= mtp_tensors(layer)
    write(tmp_path, config, tensors)
    if surplus is None:
        target, params = targets.load(tmp_path)
        assert target.config.draft_modules == modules and target.info.num_layers == 3
        plain = targets.load(FIXTURES / NAME)[1]
        jax.tree.map(np.testing.assert_array_equal, params, plain)
        return
    with pytest.raises(CheckpointError, match="5 tensors do not fit: surplus") as refused:
        targets.load(tmp_path)
    assert f"surplus model.layers.{surplus}.eh_proj.weight" in str(refused.value)


def test_other_surplus_tensors_are_refused(tmp_path):
    shutil.copytree(FIXTURES / NAME, tmp_path, dirs_exist_ok=True)
    stray = "model.layers.0.mlp.gate.weight"  # layer 0 is dense
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"language_model.{stray}"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"1 tensors do not fit: surplus {stray}"):
        targets.load(tmp_path)


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up)_.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """(a checkpoint whose experts are int4, one with the values that they stand for).

    As Kimi-K2.5 is released: everything under `language_model.`, nothing but experts quantised.
    """
    rng, stored, plain = np.random.default_rng(5), {}, {}
    text = CONFIG | {"model_type": "kimi_k2"}
    for _, spec in leaves_with_names(targets.from_config(text).specs()):
        for part in spec.published():
            name = f"language_model.{part.hf}"
            value = rng.normal(0, 0.2, part.shape).astype(np.float32)
            if "norm" in name:
                value += 1
            if ".mlp.experts." in name:
                rows, columns = part.shape
                codes = rng.integers(-8, 8, part.shape)
                scale = rng.uniform(0.01, 0.05, (rows, columns // 32)).astype(ml_dtypes.bfloat16)
                words = sum((codes[:, i::8] + 8) << (4 * i) for i in range(8))
                stored |= {
                    f"{name}_packed": words.astype(np.uint32).view(np.int32),
                    f"{name}_scale": scale,
                    f"{name}_shape": np.asarray([rows, columns]),
                }
                value = (codes * scale.astype(np.float32).repeat(32, 1)).astype(np.float32)
            else:
                stored[name] = value
            plain[name] = value
    root = tmp_path_factory.mktemp("kimi")
    outer = {"model_type": "kimi_k25", "tie_word_embeddings": False}
    quantised = outer | {"text_config": text | {"quantization_config": INT4}}
    return (
        write(root / "int4", quantised, stored),
        write(root / "plain", outer | {"text_config": text}, plain),
    )


def logits_of(target, params):
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 40, (2, 7)))

    @jax.jit
    def run(params):
        return target.logits(params, target.forward(params, tokens).hidden)

    return np.asarray(run(params))


def test_packed_experts_compute_what_they_stand_for(kimi):
    int4, plain = kimi
    target, packed = targets.load(int4)
    assert target.config.layer_loop == "scan"  # "auto", for packed weights
    experts = packed.layers[1].tree.feed_forward.experts
    assert isinstance(experts.gate, GroupInt4) and experts.gate.shape == (8, 8, 128, 64)
    assert isinstance(experts.down, GroupInt4) and experts.down.shape == (8, 8, 64, 128)
    assert len([x for x in jax.tree.leaves(packed) if x.dtype == jnp.int32]) == 3
    other, unpacked = targets.load(int4, how=TargetConfig("scan", weights="dequantised"))
    same, want = targets.load(plain, how=TargetConfig("scan"))
    assert target == other == same
    jax.tree.map(np.testing.assert_array_equal, unpacked, want)
    got, want = logits_of(target, packed), logits_of(other, unpacked)
    assert np.abs(want).max() > 0.1 and np.isfinite(want).all()
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, np.abs(want).max()))


def test_a_looped_program_unpacks_less_than_two_layers(kimi):
    """The rounds of decoding in one program: what is live of the weights stays packed.

    The same loop on a tree that is unpacked in front of it holds all eight sparse layers at once,
    which the measure sees.
    """
    target, packed = targets.load(kimi[0])
    cache = jax.eval_shape(lambda: target.init_cache(1, 16))

    def rounds(params, token, cache, count):
        def one(carry):
            token, cache, left = carry
            out = target.forward(params, token, cache=cache)
            best = target.logits(params, out.hidden).argmax(-1).astype(jnp.int32)
            return best, target.commit(cache, out.update, jnp.ones(1, jnp.int32)), left - 1

        start = (token, cache, count)
        return jax.lax.while_loop(lambda carry: carry[2] > 0, one, start)[0]

    def unpacked_first(params, *rest):
        return rounds(dequantise_tree(params, "float32"), *rest)

    layer = 8 * 3 * 128 * 64 * 4  # bytes of a layer's experts in float32
    inputs = (packed, jnp.zeros((1, 1), jnp.int32), cache, jnp.int32(3))

    def temporaries(program):
        memory = jax.jit(program).lower(*inputs).compile().memory_analysis()
        return memory.temp_size_in_bytes / layer

    assert temporaries(rounds) < 2
    assert temporaries(unpacked_first) >= 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'; this family has 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"n_routed_experts": None}, "lacks n_routed_experts"),
        ({"kv_lora_rank": None, "v_head_dim": None}, "lacks kv_lora_rank, v_head_dim"),
        ({"n_group": 3}, "8 experts do not divide into 3 groups"),
        ({"n_group": 8}, "groups of 1 expert"),
        ({"topk_group": 5}, "5 of 4 groups"),
        ({"num_experts_per_tok": 5}, "top_k 5 of 4 experts"),
        ({"model_type": "deepseek_v2"}, "'deepseek_v2' is not supported; have .*deepseek_v3"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(changes, says):
    with pytest.raises(CheckpointError, match=says) as refused:
        targets.from_config(CONFIG | changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kv_lora_rank", 20, r"kv_a_proj_with_mqa\.weight has shape \(24, 32\), .* \(28, 32\)"),
        ("q_lora_rank", None, r"missing model\.layers\.0\.self_attn\.q_proj\.weight \(80, 32\)"),
        ("first_k_dense_replace", 2, r"missing model\.layers\.1\.mlp\.gate_proj\.weight \(48, "),
        ("n_routed_experts", 13, r"missing model\.layers\.1\.mlp\.experts\.12\.gate_proj\.wei"),
        ("n_shared_experts", 2, r"shared_experts\.gate_proj\.weight has shape \(12, 32\), the"),
        ("attention_bias", True, r"missing model\.layers\.0\.self_attn\.q_a_proj\.bias \(20,\)"),
    ],
)
def test_a_configuration_that_contradicts_the_tensors(tmp_path, field, value, says):
    shutil.copytree(FIXTURES / NAME, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says) as refused:
        targets.load(tmp_path)
    assert "\n" not in str(refused.value)
