"""MTP modules on disk: inside targets, in files of their own, and where they do not fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import heads
from specjax.core.errors import CheckpointError, PairingError
from specjax.core.packed import is_packed
from specjax.heads.mtp import layouts
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead
from specjax.heads.mtp.network import MtpWeights, weight_specs
from specjax.io.hf import export_tensors, read_config, write_json, write_safetensors
from tests.heads.mtp import cases

DECLARED = {"qwen3_5": "mtp_num_hidden_layers", "qwen3_5_moe": "mtp_num_hidden_layers"}


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def target_config(name: str, modules: int) -> dict[str, Any]:
    field = DECLARED.get(name, "num_nextn_predict_layers")
    return cases.TARGETS[name] | {field: modules}


def release(name: str, to: Path, modules: int = 1, **extra: np.ndarray) -> tuple[Any, Any, Any]:
    """Write a target's modules under the target's names: (facts, head, weights)."""
    config = target_config(name, modules)
    facts = cases.targets.from_config(config).info
    head, params, _ = cases.tiny(name, modules=modules)
    if name.startswith("qwen"):  # projection and norms are stored once
        first = params.modules[0]
        params = MtpWeights(
            tuple(dataclasses.replace(first, layer=each.layer) for each in params.modules)
        )
    names, start = layouts._names(config, head, facts)
    tensors = export_tensors(weight_specs(head, names, start), params)
    write_json(config, to / "config.json")
    body = {"model.norm.weight": np.ones(3, np.float32), **tensors, **extra}
    write_safetensors(body, to / "model.safetensors")
    return facts, head, params


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "gemma4"]
)
def test_a_file_of_its_own_is_read_back_exactly(name: str, tmp_path: Path) -> None:
    head, params, _ = cases.tiny(name, modules=2, carried="raw", reuse=False)
    heads.save(head, params, tmp_path)
    again, weights = heads.load(tmp_path, cases.info(name))
    assert again == head
    same(weights, params)
    config = read_config(tmp_path)
    assert config["architectures"] == ["MTPDraftModel"]
    assert config["num_nextn_predict_layers"] == 2


@pytest.mark.parametrize(
    ("name", "modules"), [("qwen3_5", 1), ("qwen3_5", 2), ("qwen3_5_moe", 1), ("deepseek_v3", 2)]
)
def test_modules_inside_a_target(name: str, modules: int, tmp_path: Path) -> None:
    facts, head, params = release(name, tmp_path / "target", modules)
    found, weights = heads.find("mtp", tmp_path / "target", facts)
    assert found == dataclasses.replace(head, max_context=found.max_context)
    same(weights, params)
    # And out of there into a file of their own.
    heads.save(found, weights, tmp_path / "own")
    again, copied = heads.load(tmp_path / "own", facts)
    assert again == found
    same(copied, weights)


def test_stacked_experts_are_the_same_modules(tmp_path: Path) -> None:
    facts, head, params = release("qwen3_5_moe", tmp_path / "apart")
    tensors = export_tensors(weight_specs(head, layouts._QWEN), params)
    each = {n: t for n, t in tensors.items() if ".experts." in n}
    part = "mtp.layers.0.mlp.experts."

    def stacked(what: str) -> np.ndarray:
        return np.stack([each[f"{part}{e}.{what}_proj.weight"] for e in range(6)])

    rest = {n: t for n, t in tensors.items() if n not in each}
    rest[f"{part}gate_up_proj"] = np.concatenate([stacked("gate"), stacked("up")], axis=1)
    rest[f"{part}down_proj"] = stacked("down")
    write_json(target_config("qwen3_5_moe", 1), tmp_path / "stacked" / "config.json")
    write_safetensors(rest, tmp_path / "stacked" / "model.safetensors")
    same(heads.load(tmp_path / "stacked", facts)[1], params)


def test_deepseeks_copies_are_not_read(tmp_path: Path) -> None:
    stem = f"model.layers.{cases.info('deepseek_v3').num_layers}."
    table = np.zeros((cases.VOCAB, cases.HIDDEN), np.float32)
    copies = {f"{stem}embed_tokens.weight": table, f"{stem}shared_head.head.weight": table}
    facts, _, params = release("deepseek_v3", tmp_path, **copies)
    same(heads.load(tmp_path, facts)[1], params)


def test_a_wrapper_holds_the_same_modules(tmp_path: Path) -> None:
    facts, _, params = release("qwen3_5", tmp_path)
    text = read_config(tmp_path)
    write_json({"model_type": "qwen3_5", "text_config": text}, tmp_path / "config.json")
    same(heads.load(tmp_path, facts)[1], params)


def test_missing_and_surplus_tensors_are_all_named(tmp_path: Path) -> None:
    facts, head, params = release("qwen3_5", tmp_path)
    tensors = export_tensors(weight_specs(head, layouts._QWEN), params)
    del tensors["mtp.fc.weight"]
    tensors["mtp.other.weight"] = np.zeros(2, np.float32)
    write_safetensors(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing mtp.fc.weight.*surplus mtp.other.weight"):
        heads.load(tmp_path, facts)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (target_config("deepseek_v3", 0), "holds no MTP modules: it has none"),  # Kimi
        (
            cases.TARGETS["minimax_m2"] | {"use_mtp": True, "num_mtp_modules": 3},
            "declares num_mtp_modules 3, but no weights of them are published",
        ),
        (target_config("qwen3_5", 1) | {"hidden_size": 48}, "with hidden 48; this one has 32"),
        (target_config("qwen3_5", 1) | {"vocab_size": 65}, "with vocab 65"),
        (target_config("qwen3_5", 1), None),
        (target_config("deepseek_v3", 1), "with family deepseek_v3; this one has"),
    ],
    ids=["none", "unpublished", "hidden", "vocab", "fits", "family"],
)
def test_modules_that_do_not_fit_are_refused(config: dict[str, Any], match: str | None) -> None:
    kind = "qwen3_5" if match is None or "family" in match else None
    facts = cases.info(kind or "qwen3_5", draft_modules=1)
    assert layouts.recognises(config)
    if match is None:
        assert layouts.read_head(config, {}, facts).modules == 1
        return
    with pytest.raises(PairingError, match=match):
        layouts.read_head(config, {}, facts, "X")


def test_declared_modules_without_weights_are_refused(tmp_path: Path) -> None:
    write_json(target_config("qwen3_5", 1), tmp_path / "config.json")
    write_safetensors({"model.norm.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(PairingError, match="declares 1 MTP modules but stores no weights"):
        heads.load(tmp_path, cases.info("qwen3_5", draft_modules=1))


@pytest.mark.parametrize(
    ("config", "known"),
    [
        ({"architectures": ["MTPDraftModel"]}, True),
        ({"speculators_model_type": "mtp"}, True),
        ({"speculators_model_type": "dflash", "mtp_num_hidden_layers": 1}, False),
        ({"text_config": {"num_nextn_predict_layers": 0}}, True),
        (cases.TARGETS["llama"], False),
        ({"architectures": ["Gemma4AssistantForCausalLM"], "text_config": {}}, False),
    ],
)
def test_what_is_recognised(config: dict[str, Any], known: bool) -> None:
    assert layouts.recognises(config) == known


def own_file(name: str, to: Path, **changes: Any) -> None:
    """Write modules in a file of their own, fields of the layer changed; None leaves one out."""
    head, params, _ = cases.tiny(name)
    heads.save(head, params, to)
    config = json.loads((to / "config.json").read_text())
    body = {**config["transformer_layer_config"], **changes}
    config["transformer_layer_config"] = {k: v for k, v in body.items() if v is not None}
    write_json(config, to / "config.json")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_layer_of_a_mixed_target_says_its_kind(name: str, tmp_path: Path) -> None:
    own_file(name, tmp_path)  # speculators looks for the kind among the target's
    body = read_config(tmp_path)["transformer_layer_config"]
    assert (
        body["layer_types"] == ["full_attention"] == ["full_attention"] * body["num_hidden_layers"]
    )


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "minimax_m2"])
def test_a_rope_that_is_not_stated_is_the_targets(name: str, tmp_path: Path) -> None:
    # F10: the share of a head that turns is never silently the whole.
    own_file(name, tmp_path, rope_parameters=None, partial_rotary_factor=None)
    found, _ = heads.load(tmp_path, cases.info(name))
    assert found.layer.ropes == MtpHead.for_target(cases.info(name)).layer.ropes


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("qwen3_5", {"partial_rotary_factor": 1.0}, "rope"),
        ("qwen3_5", {"head_dim": 16}, "head_dim is 16, the MTP layer of this target has 8"),
        ("deepseek_v3", {"kv_lora_rank": 8}, "kv_lora_rank is 8"),
        ("deepseek_v3", {"rope_parameters": {"rope_theta": 5.0}}, "rope"),
        ("llama", {"vocab_size": 5}, "vocabulary of 5 tokens"),
        ("llama", {"hidden_size": 16}, "width 16"),
        ("llama", {"model_type": "deepseek_v3"}, "of a deepseek_v3 target"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    name: str, changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    own_file(name, tmp_path, **changes)
    with pytest.raises(PairingError, match=match):
        heads.load(tmp_path, cases.info(name))


def test_an_ordinary_file_keeps_sizes_of_its_own(tmp_path: Path) -> None:
    wide = dataclasses.replace(cases.info("llama").draft_block, mlp=56)
    head = MtpHead.for_target(cases.info("llama", draft_block=wide), MtpConfig())
    heads.save(head, head.init(jax.random.key(0), cases.borrowed()), tmp_path)
    found, _ = heads.load(tmp_path, cases.info("llama"))
    assert found == head


def test_weights_stored_in_fp8_stay_packed_and_are_unpacked_in_a_file(tmp_path: Path) -> None:
    facts, head, params = release("deepseek_v3", tmp_path / "target")
    names, first = layouts._names(target_config("deepseek_v3", 1), head, facts)
    tensors = export_tensors(weight_specs(head, names, first), params)
    name = f"model.layers.{first}.self_attn.o_proj.weight"
    small = tensors[name].astype(jnp.float8_e4m3fn)
    scale = np.full((1, 1), 0.5, np.float32)
    write_safetensors(
        {**tensors, name: small, f"{name}_scale_inv": scale},
        tmp_path / "target" / "model.safetensors",
    )
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = target_config("deepseek_v3", 1) | {"quantization_config": fp8}
    write_json(config, tmp_path / "target" / "config.json")
    found, weights = heads.load(tmp_path / "target", facts)
    assert is_packed(weights.modules[0].layer.attention.o)
    heads.save(found, weights, tmp_path / "own")
    _, plain = heads.load(tmp_path / "own", facts)
    np.testing.assert_array_equal(
        plain.modules[0].layer.attention.o, small.astype(np.float32) * 0.5
    )
