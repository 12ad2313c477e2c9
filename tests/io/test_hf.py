"""Hugging Face directories: what loads, what is refused, and how it is said."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from specjax import targets
from specjax.core.errors import CheckpointError
from specjax.core.params import ParamSpec, init_params, map_specs
from specjax.io import hf

CONFIG = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
}


def tensors_of(config=CONFIG, dtype="float32"):
    target = targets.from_config(config)
    params = init_params(target.specs(), jax.random.key(0), dtype)
    return hf.export_tensors(target.specs(), params)


@pytest.fixture
def model(tmp_path):
    """Return a function that writes a checkpoint: `model(config changes, tensors=...)`."""

    def write(tensors=None, shards=1, **changes):
        config = {**CONFIG, **changes}
        root = tmp_path / "model"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        (root / "config.json").write_text(json.dumps(config))
        tensors = tensors_of(config) if tensors is None else tensors
        if shards == 1:
            save_file(tensors, root / "model.safetensors")
            return root
        names, index = sorted(tensors), {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = names[i::shards]
            save_file({name: tensors[name] for name in part}, root / file)
            index |= dict.fromkeys(part, file)
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return root

    return write


def refusal(path):
    """The error that loading raises, as one line."""
    with pytest.raises(CheckpointError) as caught:
        targets.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(tree, other):
    def equal(a, b):
        return a.dtype == b.dtype and bool((a == b).all())

    return jax.tree.all(jax.tree.map(equal, tree, other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_files_and_dtypes(model, shards, dtype):
    tensors = tensors_of(dtype=dtype)
    root = model(tensors, shards)
    target, params = targets.load(root)
    assert target.info.stop_ids == (1,) and target.info.vocab == 48
    np.testing.assert_array_equal(
        params.layers[1].mlp.down, tensors["model.layers.1.mlp.down_proj.weight"].astype("float32")
    )
    _, stored = targets.load(root, dtype)
    assert {x.dtype for x in jax.tree.leaves(stored)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("copy", [False, True])
def test_tied_embeddings_with_and_without_the_copy(model, copy):
    tensors = tensors_of({**CONFIG, "tie_word_embeddings": True})
    if copy:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    target, params = targets.load(model(tensors, tie_word_embeddings=True))
    assert params.output is None
    assert target.output_weights(params) is params.embedding


def test_untied_without_its_output_layer_is_refused(model):
    tensors = tensors_of()
    del tensors["lm_head.weight"]
    assert "missing lm_head.weight (48, 16)" in refusal(model(tensors))


def test_buffers_of_old_checkpoints_are_skipped(model):
    tensors = tensors_of()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    targets.load(model(tensors))


def test_missing_surplus_and_misshapen_are_named_together(model):
    tensors = tensors_of()
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    tensors["model.layers.1.self_attn.o_proj.weight"] = np.zeros((16, 8), np.float32)
    text = refusal(model(tensors))
    assert "4 tensors do not fit" in text
    assert "missing model.norm.weight (16,)" in text
    assert "missing model.layers.0.mlp.up_proj.weight (24, 16)" in text
    assert "surplus model.layers.0.self_attn.q_proj.bias (16,)" in text
    assert "model.layers.1.self_attn.o_proj.weight has shape (16, 8)" in text
    assert "asks for (16, 16)" in text


def test_configuration_that_contradicts_the_weights(model):
    text = refusal(model(tensors_of(), vocab_size=50))
    assert "model.embed_tokens.weight has shape (48, 16)" in text and "(50, 16)" in text


def test_missing_shard_and_truncated_file(model):
    root = model(shards=3)
    (root / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(root)
    whole = model()
    file = whole / "model.safetensors"
    for size in (file.stat().st_size // 2, 4):
        file.write_bytes(file.read_bytes()[:size])
        text = refusal(whole)
        assert str(file) in text and "truncated or corrupt" in text


def test_shard_without_the_tensor_the_index_promises(model):
    root = model(shards=2)
    file = root / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    gone = sorted(tensors)[0]
    del tensors[gone]
    save_file(tensors, file)
    assert f"missing {gone}" in refusal(root)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "lama"},
            "minimax_m2, qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_moe; did you mean 'llama'?",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"num_key_value_heads": 3}, "4 heads do not divide over 3"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"hidden_size": None, "intermediate_size": None}, "lacks hidden_size, intermediate_size"),
    ],
)
def test_configurations_that_are_refused(model, changes, said):
    assert said in refusal(model(tensors_of(), **changes))


def test_directory_without_weights_or_with_bad_json(model):
    root = model()
    (root / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(root)
    (root / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(root)
    (root / "config.json").unlink()
    assert "config.json does not exist" in refusal(root)
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refusal(root)


def test_stop_ids_prefer_the_generation_config(model):
    root = model(eos_token_id=[1, 2])
    assert targets.load(root)[0].info.stop_ids == (1, 2)
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert targets.load(root)[0].info.stop_ids == (5, 7)
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert targets.load(root)[0].info.stop_ids == (1, 2)


@pytest.mark.parametrize(
    "path", ["/nowhere/at/all", "./nope", "nope", "a/b/c", "hf://only", "owner/name", "hf://o/n"]
)
def test_resolve_says_in_one_line_what_is_not_there(path):
    """The suite runs offline, so hub ids fail as they do for a user without a network."""
    with pytest.raises(CheckpointError) as caught:
        hf.resolve(path)
    assert path in str(caught.value) and "\n" not in str(caught.value)


def test_resolve_of_directories_and_files(model):
    root = model()
    assert hf.resolve(root) == root and hf.resolve(str(root)) == root
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a directory"):
        hf.resolve(root / "config.json")


def test_round_trip_is_exact(model, tmp_path):
    root = model(tensors_of(dtype="bfloat16"))
    target, params = targets.load(root, "bfloat16")
    extra = {"d2t": np.arange(3), "scale": np.float32(2).reshape(())}
    hf.save_checkpoint(target.specs(), params, CONFIG, tmp_path / "copy", extra=extra)
    stored = load_file(tmp_path / "copy" / "model.safetensors")
    assert stored["scale"].shape == () and np.array_equal(stored["d2t"], np.arange(3))
    again = hf.load_params(target.specs(), tmp_path / "copy", "bfloat16", ignore=extra)
    assert same(params, again)
    assert hf.read_config(tmp_path / "copy") == CONFIG
    hf.save_checkpoint(target.specs(), params, CONFIG, tmp_path / "wide", "float32")
    assert load_file(tmp_path / "wide" / "model.safetensors")["lm_head.weight"].dtype == np.float32


def test_dtype_that_a_spec_fixes_is_kept(tmp_path):
    specs = {"d2t": ParamSpec((3,), (None,), "d2t", dtype="int32")}
    hf.write_safetensors({"d2t": np.arange(3, dtype=np.int64)}, tmp_path / "model.safetensors")
    assert hf.load_params(specs, tmp_path, "bfloat16")["d2t"].dtype == jnp.int32


def test_save_is_whole_or_not_at_all(model, tmp_path, monkeypatch):
    root = model()
    target, params = targets.load(root)
    file = root / "model.safetensors"
    before = file.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf.os, "replace", full)
    with pytest.raises(CheckpointError, match=r"model\.safetensors could not be written.*No space"):
        hf.save_checkpoint(target.specs(), params, CONFIG, root)
    with pytest.raises(CheckpointError, match=r"config\.json could not be written"):
        hf.write_json(CONFIG, root / "config.json")
    assert file.read_bytes() == before
    assert {p.name for p in root.iterdir()} == {"config.json", "model.safetensors"}


def test_an_unwritable_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for write in (hf.write_safetensors, hf.write_json):
        with pytest.raises(CheckpointError, match="could not be written"):
            write({}, tmp_path / "file" / "under" / "it")


def sharded_load(root, devices):
    """Load over a mesh, split every dimension that divides, and compare with the plain load."""
    target, plain = targets.load(root)
    rows = 2 if len(devices) % 2 == 0 else 1
    mesh = Mesh(np.array(devices).reshape(rows, -1), ("data", "tensor"))

    def sharding(spec):
        names = [None] * len(spec.shape)
        for axis, size in mesh.shape.items():
            free = [i for i, n in enumerate(spec.shape) if names[i] is None and n % size == 0]
            if free:
                names[free[0]] = axis
        return NamedSharding(mesh, PartitionSpec(*names))

    shardings = map_specs(sharding, target.specs())
    _, params = targets.load(root, shardings=shardings)
    assert same(params, plain)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, params, shardings))
    return params


def test_sharded_load_on_the_devices_at_hand(model):
    sharded_load(model(shards=2), jax.devices())


def test_one_sharding_for_all(model):
    root = model()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
    _, params = targets.load(root, "bfloat16", sharding)
    assert {x.sharding for x in jax.tree.leaves(params)} == {sharding}
    assert same(params, targets.load(root, "bfloat16")[1])


@pytest.mark.devices8
def test_sharded_load_on_eight_devices_reads_slices(model, monkeypatch):
    assert len(jax.devices()) == 8
    root, sizes = model(shards=3), []
    read = hf.TensorReader.read

    def watched(self, name, index=None):
        part = read(self, name, index)
        sizes.append((index is None, part.size, name))
        return part

    targets.load(root)  # the plain load is not watched
    monkeypatch.setattr(hf.TensorReader, "read", watched)
    params = sharded_load(root, jax.devices())
    assert params.embedding.addressable_shards[0].data.size * 8 == params.embedding.size
    largest = max(size for whole, size, name in sizes if not whole)
    assert largest * 8 == params.embedding.size  # no host array ever held a matrix whole
