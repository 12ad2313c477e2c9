"""Released layouts of block heads: read and written back exactly, refused where they do not fit."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import heads
from specjax.core.errors import CheckpointError, ConfigError, PairingError
from specjax.heads.dflash import layouts
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.io.hf import TensorReader, read_config, write_json, write_safetensors
from specjax.layers.rope import RopeConfig
from specjax.targets.base import TargetInfo
from tests.heads.dflash import cases
from tests.heads.dflash.cases import DFLASH, DSPARK, SLIDING

GEMMA = cases.FIXTURES / "dspark_gemma4"
KEPT = np.arange(1, 40, 2)
FACTS = cases.info()


def tensors(root: Path) -> dict[str, np.ndarray]:
    reader = TensorReader(root / "model.safetensors")
    return {name: reader.read(name) for name in reader.shapes}


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def saved(
    to: Path, settings: dict[str, Any], kept: np.ndarray | None = None, **changes: Any
) -> tuple[DFlashHead, Any, Path]:
    head, params = cases.tiny(settings, kept, **changes)
    heads.save(head, params, to)
    return head, params, to


def altered(
    source: Path, to: Path, config: dict[str, Any] | None = None, **changed: np.ndarray | None
) -> Path:
    """Copy a head with other settings; what is given as None is left out."""
    stored = {**tensors(source), **{k.replace("__", "."): v for k, v in changed.items()}}
    kept = {name: value for name, value in stored.items() if value is not None}
    write_safetensors(kept, to / "model.safetensors")
    fields = {**read_config(source), **(config or {})}
    write_json({k: v for k, v in fields.items() if v is not None}, to / "config.json")
    return to


def gemma_target(**changes: Any) -> TargetInfo:
    facts = TargetInfo("gemma4_text", 32, 160, 12, ("full",) * 12, (1,), 1024)
    return dataclasses.replace(facts, **{"embed_scale": 32**0.5, "softcap": 8.0, **changes})


def test_a_published_head_comes_back_exactly(tmp_path: Path) -> None:
    head, params = heads.load(GEMMA, gemma_target())
    assert head.name == "dspark" and head.taps == (2, 4, 6, 9, 11) and head.max_tokens == 7
    heads.save(head, params, tmp_path)
    before, after = tensors(GEMMA), tensors(tmp_path)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype, name
        np.testing.assert_array_equal(value, after[name])
    again, reloaded = heads.load(tmp_path, gemma_target())
    assert again == head
    same(params, reloaded)
    theirs, ours = read_config(GEMMA), read_config(tmp_path)
    # What is not written back is the target's and says nothing about the head.
    shared = set(ours) & set(theirs) - {"rope_parameters", "head_dim", "num_key_value_heads"}
    assert {k: ours[k] for k in shared} == {k: theirs[k] for k in shared} | {"sliding_window": None}
    assert {"block_size", "mask_token_id", "target_layer_ids", "markov_head_type"} <= shared


ROPES = {
    "default": RopeConfig(theta=5e5, dims=12),
    "yarn": RopeConfig(
        5e4,
        12,
        "yarn",
        (
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("factor", 64.0),
            ("original_max_position_embeddings", 64.0),
        ),
    ),
}
FRESH: list[tuple[str, str, dict[str, Any], np.ndarray | None]] = [
    ("zlab", "default", {**DFLASH}, None),
    ("zlab", "yarn", {**DFLASH, **SLIDING}, None),
    ("zlab", "default", {**DFLASH, **SLIDING, "causal": "none"}, None),
    ("zlab", "default", {**DFLASH, **SLIDING, "causal": "all"}, None),
    ("deepspec", "yarn", {**DFLASH, "sample_from_anchor": True}, None),
    ("deepspec", "default", {**DSPARK, "markov_head": "gated"}, None),
    ("deepspec", "default", {**DSPARK, "confidence_with_markov": False}, None),
    ("speculators", "yarn", {**DFLASH}, KEPT),
    ("speculators", "default", {**DFLASH, "layout": "speculators", "causal": "none"}, None),
    ("speculators", "default", {**DFLASH, **SLIDING, "causal": "none"}, KEPT),
    ("speculators", "default", {**DSPARK, **SLIDING, "markov_head": "rnn"}, KEPT),
    ("speculators", "default", {**DSPARK, "sample_from_anchor": False}, None),
]


@pytest.mark.parametrize(("layout", "rope", "settings", "kept"), FRESH)
def test_a_fresh_head_survives_its_layout(
    layout: str, rope: str, settings: dict[str, Any], kept: np.ndarray | None, tmp_path: Path
) -> None:
    block = dataclasses.replace(FACTS.draft_block, rope=ROPES[rope])
    facts = cases.info(draft_block=block)
    head, params, _ = saved(tmp_path, settings, kept, facts=facts)
    assert head.config.layout == layout
    again, reloaded = heads.load(tmp_path, facts)
    assert again == head
    same(params, reloaded)
    if kept is not None:
        assert tensors(tmp_path)["d2t"].dtype == np.int64


def test_gemma_layers_survive(tmp_path: Path) -> None:
    facts = cases.gemma_info()
    head, params, _ = saved(tmp_path, {**DSPARK, "body": "gemma4"}, facts=facts)
    again, reloaded = heads.load(tmp_path, facts)
    assert again == head
    same(params, reloaded)


def test_a_head_for_gemma_says_scale_and_cap(tmp_path: Path) -> None:
    head, _, root = saved(tmp_path, DFLASH, facts=cases.gemma_info())
    assert (head.embed_scale, head.softcap) == (4.0, 5.0)
    bare = dataclasses.replace(cases.gemma_info(), embed_scale=1.0, softcap=None)
    assert heads.load(root, bare)[0] == head


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({**DFLASH, **SLIDING}, "is_causal"),
        ({**DFLASH, **SLIDING, "layout": "speculators"}, "sliding_window_non_causal"),
    ],
    ids=["zlab", "speculators"],
)
def test_causal_and_window_flags_are_exported_by_either_route(  # F40
    settings: dict[str, Any], field: str, tmp_path: Path
) -> None:
    _, _, root = saved(tmp_path / "none", {**settings, "causal": "none"})
    config = read_config(root)
    assert config[field] is (field == "sliding_window_non_causal")
    layer = config.get("transformer_layer_config", config)
    assert layer["layer_types"] == ["sliding_attention", "full_attention"]
    assert layer["sliding_window"] == 6 and layer["use_sliding_window"] is True
    saved(tmp_path / "causal", settings)
    # z-lab's readers take sliding layers for causal ones where nothing is said.
    expected = {"is_causal": None, "sliding_window_non_causal": False}[field]
    assert read_config(tmp_path / "causal").get(field) is expected
    again = heads.load(tmp_path / "causal", FACTS)[0]
    assert [again.causal(i) for i in range(2)] == [True, False]
    open_ = heads.load(root, FACTS)[0]
    assert [open_.causal(i) for i in range(2)] == [False, False]
    assert again != open_


@pytest.mark.parametrize("where", ["nested", "top"])
def test_ids_nested_or_at_the_top_mean_the_same(where: str, tmp_path: Path) -> None:  # F41
    head, _, root = saved(tmp_path / "a", DFLASH)
    own = {"mask_token_id": 39, "target_layer_ids": [0, 2, 4], "block_size": 5}
    blank: dict[str, Any] = {"block_size": None, "dflash_config": None}
    fields = {**blank, "dflash_config": own} if where == "nested" else {**blank, **own}
    again, _ = heads.load(altered(root, tmp_path / "b", fields), FACTS)
    assert again == head
    spark, _, deep = saved(tmp_path / "c", DSPARK)
    moved = {name: None for name in own} | {"dflash_config": own}
    assert heads.load(altered(deep, tmp_path / "d", moved), FACTS)[0] == spark


def test_both_revisions_of_a_rope_mean_the_same(tmp_path: Path) -> None:
    head, _, root = saved(tmp_path / "a", DFLASH)
    first = altered(root, tmp_path / "b", {"rope_parameters": None})
    second = altered(root, tmp_path / "c", {"rope_theta": None, "rope_scaling": None})
    assert heads.load(first, FACTS)[0] == heads.load(second, FACTS)[0] == head


def test_taps_are_residual_streams_whatever_the_layout_calls_them(tmp_path: Path) -> None:  # F3
    _, _, zlab = saved(tmp_path / "a", {**DFLASH, "taps": (0, 1, 2)})
    assert read_config(zlab)["dflash_config"]["target_layer_ids"] == [-1, 0, 1]
    assert heads.load(zlab, FACTS)[0].taps == (0, 1, 2)
    settings = {**DFLASH, "taps": (0, 1, 6), "layout": "speculators"}
    _, _, other = saved(tmp_path / "b", settings)
    assert read_config(other)["aux_hidden_state_layer_ids"] == [0, 1, 6]
    assert heads.load(other, FACTS)[0].taps == (0, 1, 6)


def test_a_convention_is_told_by_the_layout(tmp_path: Path) -> None:
    _, _, zlab = saved(tmp_path / "a", DFLASH)
    _, _, deep = saved(tmp_path / "b", {**DFLASH, "sample_from_anchor": True})
    assert [heads.load(root, FACTS)[0].max_tokens for root in (zlab, deep)] == [4, 5]
    _, _, both = saved(tmp_path / "c", {**DFLASH, "layout": "speculators"})
    silent = altered(both, tmp_path / "d", {"sample_from_anchor": None})
    assert heads.load(silent, FACTS)[0].max_tokens == 4
    config = read_config(saved(tmp_path / "e", DSPARK, KEPT)[2])
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    silent = altered(tmp_path / "e", tmp_path / "f", {"sample_from_anchor": None})
    assert heads.load(silent, FACTS)[0].max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "no DFlash layout that is known"),
        ({"architectures": ["Qwen3DFlashNext"]}, "no DFlash layout that is known"),
        ({"dflash_config": {"mask_token_id": 39}}, "lacks target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 4]}}, "lacks mask_token_id"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"layer_types": ["full_attention", "chunked"]}, "'chunked'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "need sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_other_networks_are_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    _, _, root = saved(tmp_path / "a", DFLASH)
    with pytest.raises(CheckpointError, match=said) as caught:
        heads.load(altered(root, tmp_path / "b", fields), FACTS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.qkv_proj.weight", "layers.1.g_proj.weight", "aux_hidden_norms.0"]
)
def test_fused_checkpoints_are_refused_by_name(name: str, tmp_path: Path) -> None:
    _, _, root = saved(tmp_path / "a", DFLASH)
    more = {name.replace(".", "__"): np.zeros((4, 4), np.float32)}
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        heads.load(altered(root, tmp_path / "b", **more), FACTS)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"hidden": 32}, "width 16, this one is 32"),
        ({"vocab": 48}, "vocabulary of 40 tokens, the target has 48"),
        ({"num_layers": 8}, "6 layers .num_target_layers., this one has 8"),
    ],
)
@pytest.mark.parametrize("settings", [DFLASH, DSPARK], ids=["zlab", "deepspec"])
def test_the_wrong_target_is_refused(
    target: dict[str, Any], said: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    saved(tmp_path, settings)
    with pytest.raises(PairingError, match=said):
        heads.load(tmp_path, cases.info(**target))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mask_token_id": 40}, r"mask_token_id 40.*0\.\.39"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"target_layer_ids": [0, 2, 5]}, r"\[1, 3, 6\].*0\.\.5"),
        ({"target_layer_ids": [-2, 2, 4]}, r"\[-1, 3, 5\]"),
    ],
)
def test_ids_that_the_target_lacks_are_refused(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    _, _, root = saved(tmp_path / "a", DSPARK)
    with pytest.raises(PairingError, match=said):
        heads.load(altered(root, tmp_path / "b", fields), FACTS)


def test_a_confidence_that_would_read_a_missing_part_is_refused(tmp_path: Path) -> None:  # F21
    _, _, root = saved(tmp_path / "a", {**DSPARK, "confidence_with_markov": False})
    broken = {"markov_rank": 0, "confidence_head_with_markov": True}
    with pytest.raises(CheckpointError, match="needs a sequential head") as caught:
        heads.load(altered(root, tmp_path / "b", broken), FACTS)
    assert "\n" not in str(caught.value)
    _, _, plain = saved(
        tmp_path / "c", {**DSPARK, "markov_rank": 0, "confidence_with_markov": False}
    )
    head, _ = heads.load(plain, FACTS)
    assert (head.name, head.config.markov_rank, head.has_confidence) == ("dspark", 0, True)


def test_sliding_layers_are_not_deepspecs(tmp_path: Path) -> None:
    _, _, root = saved(tmp_path / "a", DSPARK)
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
    with pytest.raises(CheckpointError, match="not part of DeepSpec"):
        heads.load(altered(root, tmp_path / "b", fields), FACTS)


def test_a_short_head_needs_its_map(tmp_path: Path) -> None:
    _, params, root = saved(tmp_path / "a", DFLASH, KEPT)
    with pytest.raises(PairingError, match="20 of 40 tokens but stores no d2t"):
        heads.load(altered(root, tmp_path / "b", d2t=None, t2d=None), FACTS)
    with pytest.raises(PairingError, match="choose different tokens"):
        heads.load(altered(root, tmp_path / "c", t2d=~np.asarray(params.t2d)), FACTS)


def test_what_is_not_stored_is_borrowed_only_where_it_is_the_same(tmp_path: Path) -> None:
    _, _, root = saved(tmp_path / "a", {**DFLASH, "sample_from_anchor": True})
    bare = altered(root, tmp_path / "b", embed_tokens__weight=None, lm_head__weight=None)
    head, params = heads.load(bare, FACTS)
    assert params.embedding is None and params.output is None
    assert not (head.own_embedding or head.own_output)
    _, _, short = saved(tmp_path / "c", DFLASH, KEPT)
    with pytest.raises(PairingError, match=r"lm_head.weight, and the target's \[40, 16\]"):
        heads.load(altered(short, tmp_path / "d", lm_head__weight=None), FACTS)


def test_temperatures_travel_with_the_head(tmp_path: Path) -> None:
    head, params = cases.tiny(DSPARK)
    cool = dataclasses.replace(head, temperatures=(1.0, 2.0, 0.5, 1.0, 4.0))
    heads.save(cool, params, tmp_path)
    assert heads.load(tmp_path, FACTS)[0] == cool
    with pytest.raises(ConfigError, match="2 confidence temperatures for 5 drafts"):
        dataclasses.replace(head, temperatures=(1.0, 2.0))
    with pytest.raises(ConfigError, match="positive"):
        dataclasses.replace(head, temperatures=(1.0, 2.0, 0.0, 1.0, 1.0))


def test_a_layout_without_words_for_a_head_is_not_written(tmp_path: Path) -> None:
    head, params = cases.tiny(DSPARK)
    wrong = dataclasses.replace(head, config=dataclasses.replace(head.config, layout="zlab"))
    with pytest.raises(ConfigError, match="zlab has no sample_from_anchor"):
        heads.save(wrong, params, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_other_heads_are_not_taken_for_block_heads() -> None:
    assert not layouts.recognises({"architectures": ["Qwen3Eagle3Model"]})
    assert not layouts.recognises({"speculators_model_type": "eagle3"})
    assert not layouts.recognises({"architectures": ["Qwen3ForCausalLM"]})
    assert layouts.recognises({"speculators_model_type": "dspark"})


def test_frozen_and_trained_weights(tmp_path: Path) -> None:
    head, _ = cases.tiny(DSPARK, KEPT)
    trained = head.trainable()
    assert not (trained.embedding or trained.output or trained.d2t or trained.t2d)
    assert trained.fc and trained.hidden_norm and trained.norm
    assert all(jax.tree.leaves((trained.layers, trained.markov, trained.confidence)))


def test_a_fresh_head_copies_what_it_stores_and_borrows_the_rest() -> None:
    lent = cases.borrowed()
    head = DFlashHead.for_target(FACTS, DFlashConfig(**DSPARK), len(KEPT))
    params = head.init(jax.random.key(0), lent, KEPT)
    np.testing.assert_array_equal(params.output, np.asarray(lent.output)[KEPT])
    np.testing.assert_array_equal(params.embedding, lent.embedding)
    with pytest.raises(PairingError, match="needs a draft vocabulary"):
        head.init(jax.random.key(0), lent)
    plain = DFlashHead.for_target(FACTS, DFlashConfig(**DFLASH))
    assert plain.init(jax.random.key(0), lent).embedding is None
