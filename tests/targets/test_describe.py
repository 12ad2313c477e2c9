"""What a target is, as a record: layers, sizes and memory against figures worked out by hand."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from specjax import targets
from specjax.core.errors import CheckpointError
from specjax.core.params import count
from specjax.io.hf import write_safetensors
from specjax.targets import catalog
from specjax.targets.describe import (
    describe,
    describe_directory,
    describe_entry,
    parameter_counts,
    skipped,
)

STATE = 64 * 128 * 128 * 4 + 3 * (2 * 16 + 64) * 128 * 2  # a delta-net layer of 122B-A10B
SMALL_STATE = 32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2
TINY_STATE = 16 * 128 * 128 * 4 + 3 * (2 * 16 + 16) * 128 * 2
# name -> (layers by kind, bytes per token, fixed bytes per row)
EXPECTED = {
    "DeepSeek-V3": ("61 latent", 61 * (512 + 64) * 2, 0),
    "Kimi-K2.5": ("61 latent", 61 * (512 + 64) * 2, 0),
    "MiniMax-M2.5": ("62 full", 62 * 2 * 8 * 128 * 2, 0),
    "Qwen3-14B": ("40 full", 40 * 2 * 8 * 128 * 2, 0),
    "Qwen3-30B-A3B": ("48 full", 48 * 2 * 4 * 128 * 2, 0),
    "Qwen3-4B": ("36 full", 36 * 2 * 8 * 128 * 2, 0),
    "Qwen3-8B": ("36 full", 36 * 2 * 8 * 128 * 2, 0),
    "Qwen3.5-0.8B": ("6 full, 18 recurrent", 6 * 2 * 2 * 256 * 2, 18 * TINY_STATE),
    "Qwen3.5-122B-A10B": ("12 full, 36 recurrent", 12 * 2 * 2 * 256 * 2, 36 * STATE),
    "Qwen3.5-35B-A3B": ("10 full, 30 recurrent", 10 * 2 * 2 * 256 * 2, 30 * SMALL_STATE),
    "Qwen3.5-4B": ("8 full, 24 recurrent", 8 * 2 * 4 * 256 * 2, 24 * SMALL_STATE),
    "SmolLM2-135M-Instruct": ("30 full", 30 * 2 * 3 * 64 * 2, 0),
    "gemma-4-12B-it": (
        "8 full, 40 sliding-window 1024", 8 * 2 * 1 * 512 * 2, 40 * 1024 * 2 * 8 * 256 * 2
    ),
    "gemma-4-26B-A4B-it": (
        "5 full, 25 sliding-window 1024", 5 * 2 * 2 * 512 * 2, 25 * 1024 * 2 * 8 * 256 * 2
    ),
    "gemma-4-31B-it": (
        "10 full, 50 sliding-window 1024", 10 * 2 * 4 * 512 * 2, 50 * 1024 * 2 * 16 * 256 * 2
    ),
    # Layers that share keys and values hold nothing.
    "gemma-4-E2B-it": (
        "3 full, 12 sliding-window 512, 4 full (shared), 16 sliding-window 512 (shared)",
        3 * 2 * 1 * 512 * 2, 12 * 512 * 2 * 1 * 256 * 2,
    ),
    "gemma-4-E4B-it": (
        "4 full, 20 sliding-window 512, 3 full (shared), 15 sliding-window 512 (shared)",
        4 * 2 * 2 * 512 * 2, 20 * 512 * 2 * 2 * 256 * 2,
    ),
}  # fmt: skip
EXPERTS = {
    "DeepSeek-V3": (58, 8, 256),
    "Kimi-K2.5": (60, 8, 384),
    "MiniMax-M2.5": (62, 8, 256),
    "Qwen3-30B-A3B": (48, 8, 128),
    "Qwen3.5-122B-A10B": (48, 8, 256),
    "Qwen3.5-35B-A3B": (40, 8, 256),
    "gemma-4-26B-A4B-it": (30, 8, 128),
}
TINY = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "eos_token_id": 3,
}
TINY_LATENT = {
    **TINY,
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "n_shared_experts": 1,
    "kv_lora_rank": 4,
    "q_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "num_nextn_predict_layers": 1,
}


@pytest.fixture(scope="module")
def records():
    return {name: describe_entry(catalog.read(name)) for name in catalog.names()}


def folder(path, config, tensors=None):
    """A checkpoint directory; `tensors` names what its weights hold, None for no weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        write_safetensors(dict.fromkeys(tensors, np.zeros(1)), path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_and_memory(records, name: str) -> None:
    record = records[name]
    layers = ", ".join(map(str, record.layers))
    assert (layers, record.cache_per_token, record.cache_fixed) == EXPECTED[name]
    assert sum(group.count for group in record.layers) == record.num_layers
    experts = [dataclasses.astuple(group) for group in record.experts]
    assert experts == ([EXPERTS[name]] if name in EXPERTS else [])


@pytest.mark.parametrize("name", EXPECTED)
def test_memory_is_what_a_cache_takes(records, name: str) -> None:
    record, target, capacity = records[name], catalog.read(name).build(), 2048
    cache = jax.eval_shape(lambda: target.init_cache(1, capacity, "bfloat16"))
    taken = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers))
    assert taken == record.cache_per_token * capacity + record.cache_fixed


def test_facts_of_the_entry_are_kept(records) -> None:
    entry, record = catalog.read("Kimi-K2.5"), records["Kimi-K2.5"]
    assert record.published == entry.published
    assert record.unverified == entry.unverified
    assert record.source == entry.source
    assert record.stop_ids == entry.stop_ids == (163585,)
    assert (record.family, record.hidden, record.vocab) == ("kimi_k2", 7168, 163840)
    assert record.skipped is None


def test_storage(records) -> None:
    assert records["Qwen3-8B"].storage == "bfloat16, not quantised"
    assert records["gemma-4-31B-it"].storage == "bfloat16, not quantised"
    assert records["Qwen3.5-4B"].storage == "not quantised"
    assert records["DeepSeek-V3"].storage == "fp8 in blocks of 128 x 128, packed"
    assert records["DeepSeek-V3"].unquantised == ()
    assert records["MiniMax-M2.5"].storage == "fp8 in blocks of 128 x 128, packed"
    assert records["MiniMax-M2.5"].unquantised == ("gate", "e_score_correction_bias", "lm_head")
    assert records["Kimi-K2.5"].storage == "int4 in groups of 32, packed"
    assert "lm_head" in records["Kimi-K2.5"].unquantised


def test_a_quantisation_that_cannot_be_read() -> None:
    config = {**TINY, "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(CheckpointError, match="'gptq' is not supported"):
        describe("x", targets.from_config(TINY), config)


def test_drafters(records) -> None:
    def fitting(name):
        return {drafter.name for drafter in records[name].drafters if drafter.fits}

    anyone = {"eagle3", "dflash", "dspark", "ngram", "small_model"}
    for name in records:
        own = {"mtp"} if name.startswith(("Qwen3.5", "DeepSeek")) else set()
        own |= {"gemma4_mtp"} if name.startswith("gemma-4") else set()
        assert fitting(name) == anyone | own
    # Declared in its configuration, but never published.
    why = {drafter.name: drafter.why for drafter in records["MiniMax-M2.5"].drafters}
    assert why["mtp"] == "the checkpoint holds no MTP module"
    assert why["eagle3"] == ""


def test_active_parameters() -> None:
    target = targets.from_config(TINY_LATENT)
    total, active = parameter_counts(target)
    assert total == count(target.specs())
    # One sparse layer; 4 of its 6 experts of 3 matrices of 4 x 8 are idle.
    assert total - active == 4 * 3 * 4 * 8
    assert describe("x", target, TINY_LATENT).active == active
    dense = targets.from_config(TINY)
    assert parameter_counts(dense) == (count(dense.specs()),) * 2


def test_directory(tmp_path) -> None:
    names = ("model.norm.weight", "model.visual.a", "model.visual.b", "model.layers.0.x")
    record = describe_directory(folder(tmp_path / "tiny", TINY, names))
    assert (record.name, record.family, record.source) == ("tiny", "llama", str(tmp_path / "tiny"))
    assert record.skipped == (("model.visual.*", 2),)
    assert record.stop_ids == (3,)
    assert record.published is None
    (tmp_path / "tiny" / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert describe_directory(tmp_path / "tiny").stop_ids == (3, 9)
    assert describe_directory(folder(tmp_path / "bare", TINY)).skipped is None


def test_mtp_counts_where_its_weights_are(tmp_path) -> None:
    layer = "model.layers.2.enorm.weight"
    assert describe_directory(folder(tmp_path / "config", TINY_LATENT)).mtp_modules == 1
    record = describe_directory(folder(tmp_path / "whole", TINY_LATENT, ("a", layer)))
    assert record.mtp_modules == 1
    assert record.skipped == (("model.layers.2.*", 1),)
    assert describe_directory(folder(tmp_path / "less", TINY_LATENT, ("a",))).mtp_modules == 0


def test_patterns_of_many_layers_are_one() -> None:
    target = catalog.read("gemma-4-E2B-it").build()
    dead = [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(35)]  # 15 to 34 share
    assert skipped(target, [*dead, "lm_head.weight", "model.norm.weight"]) == (
        ("model.layers.*.self_attn.k_proj.*", 20),
        ("lm_head.weight", 1),
    )


def test_bad_directories(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        describe_directory(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="model_type 'llamo' is not supported"):
        describe_directory(folder(tmp_path / "unknown", {**TINY, "model_type": "llamo"}))
    broken = folder(tmp_path / "broken", TINY)
    (broken / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        describe_directory(broken)
