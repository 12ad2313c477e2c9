"""Released assistants: read and written back exactly, and refused where they do not fit."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import heads
from specjax.core.errors import CheckpointError, PairingError
from specjax.heads.base import Borrowed
from specjax.heads.gemma4_mtp import layouts
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
from specjax.io.hf import read_config, write_json, write_safetensors
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.cache.full import FullKind
from specjax.layers.cache.window import WindowKind
from specjax.layers.rope import RopeConfig
from specjax.targets.base import KeyLayer
from tests.heads.gemma4_mtp import cases

ORDERING = "masked_embedding.token_ordering"


def test_a_round_trip_is_exact(tmp_path: Path) -> None:
    head, params = heads.load(cases.FIXTURE, cases.info())
    heads.save(head, params, tmp_path)
    before, after = (cases.read(p / "model.safetensors") for p in (cases.FIXTURE, tmp_path))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype, name  # token_ordering is int64 on disk
        np.testing.assert_array_equal(value, after[name])
    assert after[ORDERING].dtype == np.int64
    again, _ = heads.load(tmp_path, cases.info())
    assert again == head
    theirs, ours = read_config(cases.FIXTURE), read_config(tmp_path)
    shared = theirs.keys() & ours.keys() - {"text_config"}
    assert {k: theirs[k] for k in shared} == {k: ours[k] for k in shared}
    body = ours["text_config"]
    assert body == {key: theirs["text_config"][key] for key in body}


def test_what_is_read() -> None:
    head, params = heads.load(cases.FIXTURE, cases.info())
    assert (head.name, head.taps, head.reads, head.sources) == (
        "gemma4_mtp",
        (),
        (2, 3),
        (0, 0, 0, 1),
    )
    assert [head.window(i) for i in range(4)] == [6, 6, 6, None]
    assert (head.config.centroids, head.config.centroid_top_k) == (12, 3)
    assert head.config.position == "draft_window"
    assert params.embedding.shape == (144, 32)
    trained = head.trainable()
    assert trained.embedding and not trained.clusters.ordering and not trained.layers[0].scalar


def test_both_kinds_are_recognised() -> None:
    for kind in ("gemma4_assistant", "gemma4_unified_assistant"):
        assert layouts.recognises({"model_type": kind})
    assert layouts.recognises({"architectures": ["Gemma4UnifiedAssistantForCausalLM"]})
    assert not layouts.recognises(
        {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    )


def test_the_unified_kind_stays_what_it_is() -> None:
    config = {**read_config(cases.FIXTURE), "model_type": "gemma4_unified_assistant"}
    written = layouts.write_config(layouts.read_head(config, {}, cases.info()))
    assert written["model_type"] == "gemma4_unified_assistant"
    assert written["architectures"] == ["Gemma4UnifiedAssistantForCausalLM"]
    assert written["text_config"]["model_type"] == "gemma4_unified_text"


def test_the_position_survives() -> None:
    config = {**read_config(cases.FIXTURE), "specjax_position": "draft_serving"}
    head = layouts.read_head(config, {}, cases.info())
    assert head.config.position == "draft_serving"
    assert layouts.read_head(layouts.write_config(head), {}, cases.info()) == head
    with pytest.raises(CheckpointError, match="specjax_position 'x'"):
        layouts.read_head({**config, "specjax_position": "x"}, {}, cases.info())


SLIDING, FULL = cases.info().key_layers[2:4]


def wrong_layer(index: int, **changes: Any) -> dict[str, Any]:
    layers = list(cases.info().key_layers)
    layers[index] = dataclasses.replace(layers[index], **changes)
    return {"key_layers": tuple(layers)}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden": 64}, "width 32, this one is 64"),
        ({"vocab": 145}, "vocabulary of 144 tokens, the target has 145"),
        (wrong_layer(2, cache=WindowKind(2, 8, 8, 6)), "sliding layers expect key-value heads 1"),
        (wrong_layer(3, cache=FullKind(1, 8, 8)), "full layers expect dims of a key 16"),
        (wrong_layer(2, cache=WindowKind(1, 8, 8, 7)), "keys in a window 6, layer 2"),
        (wrong_layer(3, rope=RopeConfig(1e5, 16)), "full layers expect rope"),
        ({"key_layers": (None, None, SLIDING, None, None, None)}, "keys of full layers"),
        ({"key_layers": (None,) * 6}, "keys of sliding layers"),
    ],
    ids=["width", "vocabulary", "kv-heads", "head-dim", "window", "rope", "no-full", "latent"],
)
def test_another_target_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(PairingError, match=match):
        heads.load(cases.FIXTURE, cases.info(**changes))


@pytest.mark.parametrize(
    ("outer", "inner", "match"),
    [
        ({"backbone_hidden_size": None}, {}, "lacks backbone_hidden_size"),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings"),
        ({}, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({}, {"num_kv_shared_layers": 2}, "layer 0 of an assistant has no keys"),
        ({"centroid_intermediate_top_k": 13}, {}, "top_k 13 must be in 1..12"),
    ],
    ids=["width", "untied", "capped", "own-keys", "top-k"],
)
def test_what_no_assistant_has_is_refused(
    outer: dict[str, Any], inner: dict[str, Any], match: str
) -> None:
    config = read_config(cases.FIXTURE)
    config = {**config, **outer, "text_config": {**config["text_config"], **inner}}
    with pytest.raises(CheckpointError, match=match):
        layouts.read_head(config, {}, cases.info(), "x")


def test_centroids_that_do_not_divide_the_vocabulary() -> None:
    config = {**read_config(cases.FIXTURE), "num_centroids": 13}
    with pytest.raises(PairingError, match="13 centroids do not divide a vocabulary of 144"):
        layouts.read_head(config, {}, cases.info())


def test_an_ordering_that_is_none_is_refused(tmp_path: Path) -> None:
    stored = cases.read(cases.FIXTURE / "model.safetensors")
    stored[ORDERING] = np.append(stored[ORDERING][:-1], stored[ORDERING][0])
    write_safetensors(stored, tmp_path / "model.safetensors")
    write_json(read_config(cases.FIXTURE), tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="each of the 144 tokens once"):
        heads.load(tmp_path, cases.info())


def test_the_output_layer_has_the_drafts_width(tmp_path: Path) -> None:  # F57
    stored = cases.read(cases.FIXTURE / "model.safetensors")
    stored["model.embed_tokens.weight"] = np.zeros((144, 64), np.float32)
    write_safetensors(stored, tmp_path / "model.safetensors")
    write_json(read_config(cases.FIXTURE), tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has shape \(144, 64\)"):
        heads.load(tmp_path, cases.info())


ROPES = {
    "default": RopeConfig(5e5, 8),
    "partial": RopeConfig(1e7, 4),
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
def test_a_head_for_another_family_survives(rope: str, tmp_path: Path) -> None:
    layer = KeyLayer(FullKind(2, 8, 8), ROPES[rope])
    block = BlockConfig(32, 4, 2, 8, 40, 1e-5, ROPES[rope])
    facts = cases.info(
        family="qwen3", embed_scale=1.0, key_layers=(layer, None, layer, None), draft_block=block
    )
    head = Gemma4MtpHead.for_target(facts, Gemma4MtpConfig(layers=2, centroids=6, centroid_top_k=2))
    assert (head.reads, head.sources, head.hidden, head.layers[0].mlp) == ((2,), (0, 0), 8, 64)
    table = jax.random.normal(jax.random.key(0), (144, 32))
    params = head.init(jax.random.key(1), Borrowed(table, table))
    heads.save(head, params, tmp_path)
    # transformers refuses null, also where no layer has a window.
    assert read_config(tmp_path)["text_config"]["sliding_window"] == 512
    again, reloaded = heads.load(tmp_path, facts)
    assert again == dataclasses.replace(head, config=again.config)
    assert again.config == Gemma4MtpConfig(centroids=6, centroid_top_k=2)
    jax.tree.map(np.testing.assert_array_equal, params, reloaded)
