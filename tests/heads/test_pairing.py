"""Rows that are the target's may stay out of a head's file; that target alone gives them back."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import heads
from specjax.core.errors import CheckpointError, PairingError
from specjax.heads import describe, pairing
from specjax.heads.base import Borrowed
from specjax.heads.export import Verifier, export
from specjax.io.hf import TensorReader, read_config, write_json
from tests.heads.dflash import cases as blocks
from tests.heads.eagle3 import cases as chains

KEPT = np.arange(1, 40, 2)
TARGET = Verifier("owner/target", ("LlamaForCausalLM",))


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DSpark head over a draft vocabulary, without its target's rows."""
    root = tmp_path_factory.mktemp("bodies")
    head, params = blocks.tiny(blocks.DSPARK, KEPT)
    done = export(
        head,
        params,
        blocks.borrowed(),
        root,
        layout="speculators",
        verifier=TARGET,
        bodies_only=True,
    )
    assert done.left_out == done.from_target == pairing.ROWS
    return root


def test_the_file_lacks_the_rows_and_says_whose_they_are(bodies: Path) -> None:  # F39
    stored = TensorReader(bodies).shapes
    assert "embed_tokens.weight" not in stored and "lm_head.weight" not in stored
    said = read_config(bodies)[pairing.FIELD]
    assert said["rows"] == ["embedding", "output"] and said["target"] == "owner/target"


def test_loading_takes_the_rows_of_the_draft_vocabulary(bodies: Path) -> None:
    head, params = blocks.tiny(blocks.DSPARK, KEPT)
    lent = blocks.borrowed()
    again, loaded = heads.load(bodies, blocks.info(), borrowed=lent)
    np.testing.assert_array_equal(loaded.output, np.asarray(lent.output)[KEPT])
    assert loaded.embedding is None and again == dataclasses.replace(head, own_embedding=False)
    rest = dataclasses.replace(params, embedding=None)
    jax.tree.map(np.testing.assert_array_equal, rest, loaded)
    states = blocks.states(1, 9)
    around = blocks.context(blocks.after(head, params, states), 5)
    first = blocks.draft(head, params, lent, blocks.after(head, params, states), around, 5)
    second = blocks.draft(again, loaded, lent, blocks.after(again, loaded, states), around, 5)
    np.testing.assert_array_equal(first[1].logits, second[1].logits)


def test_rows_of_a_draft_vocabulary_go_where_the_weights_are_sharded(bodies: Path) -> None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    head, _ = heads.load(bodies, blocks.info(), borrowed=blocks.borrowed())
    tree = jax.tree.map(lambda _: place, head.specs())
    for given in (place, tree):
        _, loaded = heads.load(bodies, blocks.info(), "bfloat16", given, blocks.borrowed())
        assert loaded.output.sharding == place and loaded.output.dtype == jnp.bfloat16


def test_another_target_is_refused(bodies: Path) -> None:
    other = blocks.borrowed(seed=8)
    with pytest.raises(PairingError, match=r"rows from owner/target .* are others"):
        heads.load(bodies, blocks.info(), borrowed=other)
    with pytest.raises(PairingError, match=r"load it\s+together with that target"):
        heads.load(bodies, blocks.info())


def test_it_can_be_described_without_its_target(bodies: Path, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 16, "vocab_size": 40, "num_hidden_layers": 6}
    config |= {"num_attention_heads": 2, "head_dim": 8, "intermediate_size": 24}
    write_json(config, tmp_path / "config.json")
    found = describe.describe_directory(bodies, str(tmp_path))
    assert found.draft_vocab == len(KEPT)


def test_a_malformed_word_is_refused(bodies: Path, tmp_path: Path) -> None:
    config = read_config(bodies)
    for wrong in ("yes", {"rows": ["norm"], "sha256": "0"}, {"rows": ["output"]}):
        broken = tmp_path / "broken"
        write_json({**config, pairing.FIELD: wrong}, broken / "config.json")
        (broken / "model.safetensors").write_bytes((bodies / "model.safetensors").read_bytes())
        with pytest.raises(CheckpointError, match=pairing.FIELD):
            heads.load(broken, blocks.info(), borrowed=blocks.borrowed())


def test_only_rows_that_are_equal_bit_for_bit_are_the_targets() -> None:
    head, params, lent = chains.tiny(KEPT)
    assert head.own_output and not head.own_embedding
    assert pairing.lent_rows(params, lent) == ("output",)
    last = params.output.at[3, 5].set(np.nextafter(np.float32(params.output[3, 5]), 9))
    assert pairing.lent_rows(dataclasses.replace(params, output=last), lent) == ()
    fewer = Borrowed(lent.embedding[:, :8], lent.output[:, :8])
    assert pairing.lent_rows(params, fewer) == ()


def test_the_digest_sees_the_tables_and_not_their_dtype() -> None:
    lent = blocks.borrowed(vocab=3000)
    whole = pairing.digest(lent)
    short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), lent)
    assert pairing.digest(short) == pairing.digest(jax.tree.map(jnp.float32, short))
    assert pairing.digest(Borrowed(lent.output, lent.embedding)) != whole
    assert pairing.digest(Borrowed(lent.embedding, lent.output * 1.01)) != whole


def test_the_note_says_what_was_taken(bodies: Path, tmp_path: Path) -> None:
    assert "embedding and output" in pairing.note(bodies)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": []}))
    assert pairing.note(tmp_path) == ""
