"""Released layouts: read and written back exactly, and refused where they do not fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import heads
from specjax.core.errors import CheckpointError, PairingError, SpecJaxError
from specjax.heads.base import NullHead
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.eagle3.layouts import read_head
from specjax.heads.eagle3.network import draft_logits
from specjax.heads.vocabulary import kept_ids
from specjax.io.hf import TensorReader, read_config, write_json, write_safetensors
from specjax.layers.rope import RopeConfig
from tests.heads.eagle3 import cases

NAMES = ("eagle3_llama", "eagle3_qwen3", "eagle3_speculators")


def tensors(root: Path) -> dict[str, np.ndarray]:
    return cases.read(root / "model.safetensors")


def altered(
    source: Path, to: Path, config: dict[str, Any] | None = None, **changed: np.ndarray | None
) -> Path:
    """Copy a head with other settings; a tensor given as None is left out."""
    stored = {**tensors(source), **{k.replace("__", "."): v for k, v in changed.items()}}
    kept = {name: value for name, value in stored.items() if value is not None}
    write_safetensors(kept, to / "model.safetensors")
    write_json({**read_config(source), **(config or {})}, to / "config.json")
    return to


@pytest.mark.parametrize("name", NAMES)
def test_a_round_trip_is_exact(name: str, tmp_path: Path) -> None:
    source = cases.FIXTURES / name
    head, params = heads.load(source, cases.info())
    heads.save(head, params, tmp_path)
    before, after = tensors(source), tensors(tmp_path)
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype, tensor
        np.testing.assert_array_equal(value, after[tensor])
    again, reloaded = heads.load(tmp_path, cases.info())
    assert again == head
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(reloaded), strict=True):
        np.testing.assert_array_equal(a, b)
    theirs, ours = read_config(source), read_config(tmp_path)
    assert ours["architectures"] == theirs["architectures"]
    assert ours["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("name", "taps"),
    list(zip(NAMES, [(2, 6, 9), (2, 4, 6, 8, 10), (2, 6, 9)], strict=True)),
)
def test_taps_are_residual_streams_whatever_the_layout_calls_them(
    name: str, taps: tuple[int, ...]
) -> None:
    assert heads.load(cases.FIXTURES / name, cases.info())[0].taps == taps


ROPES = {
    "default": RopeConfig(theta=5e5, dims=8),
    "llama3": RopeConfig(
        5e5,
        8,
        "llama3",
        (
            ("factor", 8.0),
            ("high_freq_factor", 4.0),
            ("low_freq_factor", 1.0),
            ("original_max_position_embeddings", 64.0),
        ),
    ),
}


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize(
    ("kept", "norms", "layout"),
    [
        (np.arange(3, 33), {}, "safeai"),
        (None, {}, "deepspec"),
        (np.arange(3, 33), {"norm_before_fc": True, "norm_output": True}, "speculators"),
        (None, {"fc_norm": True}, "speculators"),
    ],
    ids=["safeai", "deepspec", "speculators", "speculators-full"],
)
def test_a_fresh_head_survives_its_layout(
    kept: np.ndarray | None, norms: dict[str, bool], layout: str, rope: str, tmp_path: Path
) -> None:
    facts = cases.info(hidden=16, vocab=40, num_layers=6, max_context=128)
    block = cases.tiny_block(rope=ROPES[rope], qk_norm=layout == "deepspec")
    settings = Eagle3Config(taps=(1, 3, 4), **norms)
    head = Eagle3Head.for_target(facts, block, settings, None if kept is None else len(kept))
    params = head.init(jax.random.key(0), cases.tiny_borrowed(), kept)
    assert head.layout == layout
    heads.save(head, params, tmp_path)
    again, reloaded = heads.load(tmp_path, facts)
    assert again == head
    np.testing.assert_array_equal(params.fc, reloaded.fc)


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "from-tensors"])
def test_head_dim_is_never_hidden_over_heads(stated: bool, tmp_path: Path) -> None:  # F14
    facts = cases.info(hidden=64, vocab=97)
    block = cases.tiny_block(
        hidden=64, heads=4, kv_heads=2, head_dim=32, rope=RopeConfig(theta=1e4, dims=32)
    )
    head = Eagle3Head.for_target(facts, block, draft_vocab=32)
    params = head.init(
        jax.random.key(0), cases.tiny_borrowed(vocab=97, hidden=64), np.arange(0, 96, 3)
    )
    assert params.layer.body.attention.q.shape == (128, 128)
    heads.save(head, params, tmp_path)
    if not stated:
        config = read_config(tmp_path)
        del config["head_dim"]
        write_json(config, tmp_path / "config.json")
    again, _ = heads.load(tmp_path, facts)
    assert again.geometry.block.head_dim == 32
    assert again == head


def short_head(to: Path) -> tuple[Eagle3Head, Any, Path]:
    """Save a head with 32 of 40 tokens."""
    kept = np.sort(np.random.default_rng(2).permutation(40)[:32])
    head, params, _ = cases.tiny(kept)
    heads.save(head, params, to)
    return head, params, to


TINY = cases.info(hidden=16, vocab=40, num_layers=6, max_context=128)


def test_a_short_head_travels_with_its_map(tmp_path: Path) -> None:  # F31
    head, params, root = short_head(tmp_path)
    again, reloaded = heads.load(root, TINY)
    np.testing.assert_array_equal(kept_ids(params), kept_ids(reloaded))
    assert tensors(root)["d2t"].dtype == np.int64
    with pytest.raises(PairingError, match="d2t and t2d"):
        heads.save(dataclasses.replace(head, mapped=False), params, root / "other")
    emptied = dataclasses.replace(params, t2d=jnp.zeros_like(params.t2d))
    with pytest.raises(PairingError, match="different tokens"):
        heads.save(again, emptied, root / "other")
    assert not (root / "other").exists()


def test_a_short_head_without_map_is_refused(tmp_path: Path) -> None:  # F32
    _, _, root = short_head(tmp_path / "a")
    bare = altered(root, tmp_path / "b", d2t=None, t2d=None)
    with pytest.raises(PairingError, match=r"32 of 40 tokens but stores no d2t"):
        heads.load(bare, TINY)
    silent = altered(bare, tmp_path / "c", {"draft_vocab_size": None})
    with pytest.raises(PairingError, match=r"32 of 40"):
        heads.load(silent, TINY)


def test_maps_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    _, _, root = short_head(tmp_path / "a")
    d2t, t2d = tensors(root)["d2t"], tensors(root)["t2d"]
    with pytest.raises(PairingError, match="choose different tokens"):
        heads.load(altered(root, tmp_path / "b", t2d=~t2d), TINY)
    with pytest.raises(PairingError, match="d2t is no map"):
        heads.load(altered(root, tmp_path / "c", d2t=d2t * 0 + np.arange(32)[::-1]), TINY)


@pytest.mark.parametrize("name", ["eagle3_llama", "eagle3_qwen3"])
def test_an_output_layer_of_its_own_is_kept(name: str) -> None:  # F33
    case = cases.case(name)
    np.testing.assert_array_equal(
        case.params.output, tensors(cases.FIXTURES / name)["lm_head.weight"]
    )
    out = jnp.ones((1, 32))
    stranger = dataclasses.replace(case.borrowed, output=case.borrowed.output * -1)
    np.testing.assert_array_equal(
        draft_logits(case.head, case.params, case.borrowed, out),
        draft_logits(case.head, case.params, stranger, out),
    )


def test_a_missing_output_layer_is_borrowed_only_where_it_is_the_same(tmp_path: Path) -> None:
    full = altered(
        cases.FIXTURES / "eagle3_qwen3",
        tmp_path / "a",
        embed_tokens__weight=None,
        lm_head__weight=None,
    )
    head, params = heads.load(full, cases.info())
    assert not head.own_output
    borrowed = cases.case("eagle3_qwen3").borrowed
    assert draft_logits(head, params, borrowed, jnp.ones((1, 32))).shape == (1, 160)
    short = altered(cases.FIXTURES / "eagle3_llama", tmp_path / "b", lm_head__weight=None)
    with pytest.raises(PairingError, match=r"stores no lm_head.weight.*\[96, 32\]"):
        heads.load(short, cases.info())


def test_a_tied_target_does_not_tie_the_head(tmp_path: Path) -> None:  # F34
    head, params, root = short_head(tmp_path / "a")
    assert read_config(root)["tie_word_embeddings"] is False
    copied = altered(root, tmp_path / "b", {"tie_word_embeddings": True})
    again, reloaded = heads.load(copied, TINY)
    assert (again.geometry.block, again.draft_vocab, again.own_output) == (
        head.geometry.block,
        32,
        True,
    )
    np.testing.assert_array_equal(params.output, reloaded.output)
    assert reloaded.output.shape == (32, 16)


@pytest.mark.parametrize(
    ("name", "facts", "match"),
    [
        ("eagle3_llama", {"vocab": 161}, r"160 tokens, the target has 161"),  # F71
        ("eagle3_qwen3", {"vocab": 168}, r"160 tokens, the target has 168"),
        ("eagle3_speculators", {"vocab": 152}, r"160 tokens, the target has 152"),
        ("eagle3_llama", {"hidden": 64}, r"width 32, this one is 64"),
        ("eagle3_llama", {"num_layers": 1}, r"taps layers \[2, 0, -2\]"),
        ("eagle3_speculators", {"num_layers": 8}, r"taps layers \[2, 6, 9\].*0\.\.8"),
        ("eagle3_qwen3", {"num_layers": 10}, r"\[1, 3, 5, 7, 9\].*0\.\.8"),
    ],
    ids=["F71-llama", "F71-qwen3", "F71-speculators", "width", "taps", "taps-spec", "taps-deep"],
)
def test_another_target_is_refused_before_anything_is_read(
    name: str, facts: dict[str, int], match: str
) -> None:
    root = cases.FIXTURES / name
    shapes = TensorReader(root).shapes
    with pytest.raises(PairingError, match=match):
        read_head(read_config(root), shapes, cases.info(**facts))


def test_all_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    root = altered(
        cases.FIXTURES / "eagle3_llama",
        tmp_path,
        norm__weight=None,
        midlayer__mlp__up_proj__weight=None,
        fc__weight=np.zeros((32, 64), np.float32),
    )
    with pytest.raises(CheckpointError) as error:
        heads.load(root, cases.info())
    for part in ("missing norm.weight", "midlayer.mlp.up_proj.weight", "fc.weight has shape"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("eagle3_llama", {"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 head"),
        ("eagle3_llama", {"num_hidden_layers": 2}, "2 draft layers"),
        ("eagle3_llama", {"norm_output": False}, "norm_output false"),
        ("eagle3_llama", {"hidden_act": "gelu"}, "gelu"),
        ("eagle3_qwen3", {"target_layer_ids": None}, "lacks target_layer_ids"),
        ("eagle3_qwen3", {"model_type": "gemma4_text"}, "lacks global_head_dim"),
        ("eagle3_speculators", {"speculators_model_type": "dflash"}, "not an EAGLE-3 head"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_no_reader_understands_is_refused(
    name: str, changes: dict[str, Any], match: str
) -> None:
    root = cases.FIXTURES / name
    config = {**read_config(root), **changes}
    with pytest.raises(SpecJaxError, match=match):
        read_head(config, TensorReader(root).shapes, cases.info())


def test_norms_that_a_layout_cannot_express_are_not_dropped(tmp_path: Path) -> None:
    head, params, _ = cases.tiny(None, norm_output=True)
    with pytest.raises(PairingError, match="cannot express"):
        heads.save(dataclasses.replace(head, layout="deepspec"), params, tmp_path)


def test_a_head_without_weights_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'none'"):
        heads.save(NullHead(), (), tmp_path)


def test_bfloat16_on_disk_is_bfloat16_again(tmp_path: Path) -> None:
    head, params, _ = cases.tiny(None)
    heads.save(head, params, tmp_path, "bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 40
    _, reloaded = heads.load(tmp_path, TINY, "bfloat16")
    np.testing.assert_array_equal(params.fc.astype(jnp.bfloat16), reloaded.fc)
