"""Quantised checkpoints: which are accepted, which tensors make up a weight, what is refused."""

import copy
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from specjax.core.errors import CheckpointError
from specjax.core.packed import BlockFp8, GroupInt4, Mxfp4, is_packed
from specjax.core.params import ParamSpec, stack
from specjax.io import hf
from specjax.io.quant import (
    Quantisation,
    as_held,
    dequantise_tree,
    pack_specs,
    quantised_specs,
    quantization_method,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quant"
RNG = np.random.default_rng(11)

# The settings that matter of released configurations: MiniMax-M2.5, Kimi-K2.5, AMD Quark.
FP8 = {
    "quant_method": "fp8",
    "fmt": "float8_e4m3fn",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
                "dynamic": False,
            },
        }
    },
}
MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
QUARK = {
    "quant_method": "quark",
    "exclude": ["lm_head"],
    "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    "global_quant_config": {
        "weight": {**MX, "is_dynamic": False},
        "input_tensors": {**MX, "is_dynamic": True},
        "bias": None,
    },
    "layer_quant_config": {},
    "layer_type_quant_config": {},
}


def changed(config: dict, path: str, value: object) -> dict:
    """Return a copy of a configuration with the setting at `path` replaced."""
    out = copy.deepcopy(config)
    *parents, last = path.split("/")
    at = out
    for name in parents:
        at = at[name]
    at[last] = value
    return out


@pytest.mark.parametrize(
    ("stated", "want"),
    [
        (FP8, Quantisation("fp8", (128, 128))),
        (changed(FP8, "weight_block_size", [64, 32]), Quantisation("fp8", (64, 32))),
        (changed(FP8, "fmt", "e4m3"), Quantisation("fp8", (128, 128))),
        (INT4, Quantisation("int4", (1, 32))),
        (QUARK, Quantisation("mxfp4", (1, 32))),
        (changed(QUARK, "layer_quant_config", {"*mtp*": None}), Quantisation("mxfp4", (1, 32))),
    ],
)
def test_methods(stated, want):
    assert quantization_method({"quantization_config": stated}) == want
    assert quantization_method({"text_config": {"quantization_config": stated}}) == want


def test_unquantised():
    assert quantization_method({"model_type": "llama"}) is None
    assert quantization_method({"quantization_config": None, "text_config": {}}) is None


WEIGHTS = "config_groups/group_0/weights/"


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"bits": 4}, "quant_method None"),
        (changed(FP8, "weight_block_size", None), "weight_block_size None"),
        (changed(FP8, "fmt", "e5m2"), "fmt 'e5m2'"),
        (changed(FP8, "activation_scheme", "static"), "activation_scheme 'static'"),
        (changed(INT4, "format", "float-quantized"), "format 'float-quantized'"),
        (changed(INT4, WEIGHTS + "num_bits", 8), "num_bits 8"),
        (changed(INT4, WEIGHTS + "type", "float"), "type 'float'"),
        (changed(INT4, WEIGHTS + "symmetric", False), "symmetric False"),
        (changed(INT4, WEIGHTS + "strategy", "channel"), "strategy 'channel'"),
        (changed(INT4, WEIGHTS + "actorder", "group"), "actorder 'group'"),
        (changed(INT4, WEIGHTS + "group_size", 20), "group_size 20"),
        (changed(INT4, "config_groups", {}), "group sizes []"),
        (changed(QUARK, "global_quant_config/weight/dtype", "int8"), "dtype 'int8'"),
        (changed(QUARK, "global_quant_config/weight/group_size", 16), "group_size 16"),
        (changed(QUARK, "global_quant_config/weight/scale_format", "float"), "scale_format"),
        (changed(QUARK, "global_quant_config/weight/qscheme", "per_tensor"), "qscheme"),
        (changed(QUARK, "global_quant_config/weight", [MX, MX]), "weight ["),
        (changed(QUARK, "export/weight_format", "fake_quantized"), "'fake_quantized'"),
        (
            changed(QUARK, "layer_quant_config", {"*self_attn*": {"weight": {"dtype": "fp8"}}}),
            "quark *self_attn* with weight dtype 'fp8'",
        ),
    ],
)
def test_what_is_not_supported_is_named(stated, named):
    with pytest.raises(CheckpointError) as refused:
        quantization_method({"quantization_config": stated})
    message = str(refused.value)
    assert named in message
    for method in ("fp8 (e4m3) with weight_block_size", "pack-quantized", "quark mxfp4"):
        assert method in message
    assert "\n" not in message


def spec(name: str, *shape: int) -> ParamSpec:
    return ParamSpec(shape, ("mlp", "embed")[-len(shape) :], name)


def store(kind: str, name: str, rows: int, columns: int) -> tuple[dict, dict, np.ndarray]:
    """Return (tensors, quantization_config, the weight they stand for) of one module."""
    if kind == "fp8":
        values = RNG.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
        scale = RNG.uniform(0.5, 2, (-(-rows // 16), -(-columns // 16))).astype(np.float32)
        spread = scale.repeat(16, 0)[:rows].repeat(16, 1)[:, :columns]
        tensors = {f"{name}.weight": values, f"{name}.weight_scale_inv": scale}
        config = changed(FP8, "weight_block_size", [16, 16])
        return tensors, config, values.astype(np.float32) * spread
    if kind == "int4":
        values = RNG.integers(-8, 8, (rows, columns))
        scale = RNG.uniform(0.5, 2, (rows, columns // 32)).astype(ml_dtypes.bfloat16)
        words = sum((values[:, i::8] + 8) << (4 * i) for i in range(8))
        tensors = {
            f"{name}.weight_packed": words.astype(np.uint32).view(np.int32),
            f"{name}.weight_scale": scale,
            f"{name}.weight_shape": np.asarray([rows, columns]),
        }
        return tensors, INT4, (values * scale.astype(np.float32).repeat(32, 1)).astype(np.float32)
    codes = RNG.integers(0, 16, (rows, columns))
    exponents = RNG.integers(120, 130, (rows, columns // 32))
    tensors = {
        f"{name}.weight": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        f"{name}.weight_scale": exponents.astype(np.uint8),
    }
    table = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([table, -table])[codes]
    return tensors, QUARK, values * (2.0 ** (exponents - 127)).repeat(32, 1).astype(np.float32)


TYPES = {"fp8": BlockFp8, "int4": GroupInt4, "mxfp4": Mxfp4}


def write(path: Path, tensors: dict) -> hf.TensorReader:
    save_file(tensors, path / "model.safetensors")
    return hf.TensorReader(path)


def load(specs, reader, config, **options):
    packed, ignore = quantised_specs(specs, reader, {"quantization_config": config})
    return hf.load_params(packed, reader, ignore=ignore, **options)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_stored_quantised_is_loaded_packed(tmp_path, kind, sharded):
    """Experts of two layers are quantised, the norm and lm_head of the same file are not."""
    specs, tensors, want = {}, {}, []
    for i in range(2):
        for e in range(3):
            parts, config, value = store(kind, f"model.layers.{i}.mlp.experts.{e}.up_proj", 16, 64)
            tensors |= parts
            want.append(value)
    head = RNG.normal(size=(16, 64)).astype(np.float32)
    tensors |= {"lm_head.weight": head, "model.norm.weight": np.ones(64, np.float32)}
    names = [[f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for e in range(3)] for i in (0, 1)]
    experts = [stack([spec(name, 16, 64) for name in layer], "experts") for layer in names]
    specs = {
        "head": spec("lm_head.weight", 16, 64),
        "norm": spec("model.norm.weight", 64),
        "one": experts[1],
        "up": stack(experts, "layers"),
    }
    shardings = NamedSharding(Mesh(jax.devices()[:1], "x"), PartitionSpec()) if sharded else None
    params = load(specs, write(tmp_path, tensors), config, shardings=shardings)
    up = params["up"]
    assert type(up) is type(params["one"]) is TYPES[kind]
    assert up.shape == (2, 3, 16, 64)
    assert not is_packed(params["head"]) and not is_packed(params["norm"])
    if kind == "int4":
        assert up.scale.dtype == jnp.uint16  # the bits of bfloat16

    unpacked = dequantise_tree(params, "float32")
    np.testing.assert_array_equal(unpacked["up"], np.stack(want).reshape(2, 3, 16, 64))
    np.testing.assert_array_equal(unpacked["one"], np.stack(want[3:]))
    np.testing.assert_array_equal(unpacked["head"], head)
    assert dequantise_tree(params, "bfloat16")["up"].dtype == jnp.bfloat16


def test_axes_of_what_a_weight_is_stored_in():
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    specs = stack([spec(name.format(e), 40, 64) for e in range(2)], "experts")
    fp8 = {name.format(e) + "_scale_inv": (3, 4) for e in range(2)}
    leaf = pack_specs(specs, fp8, Quantisation("fp8", (16, 16)))
    assert leaf.values.axes == ("experts", "mlp", "embed")
    assert (leaf.scale.axes, leaf.scale.shape) == (("experts", None, None), (2, 3, 4))
    int4 = {name.format(e) + "_packed": (40, 8) for e in range(2)}
    leaf = pack_specs(specs, int4, Quantisation("int4", (1, 32), "float16"))
    assert leaf.packed.axes == leaf.scale.axes == ("experts", "mlp", "embed")
    assert [part.hf for part in leaf.scale.parts] == [name.format(e) + "_scale" for e in range(2)]
    assert (leaf.packed.shape, leaf.packed.dtype) == ((2, 40, 8), "int32")
    assert (leaf.scale.shape, leaf.scale.dtype) == ((2, 40, 2), "float16")


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_files_of_other_libraries(tmp_path, kind):
    stored = load_file(FIXTURES / f"{kind}.safetensors")
    want = stored.pop("expected")
    wrapped = {f"language_model.model.layers.0.mlp.up_proj.{n}": t for n, t in stored.items()}
    specs = spec("model.layers.0.mlp.up_proj.weight", 16, 96)
    params = load(specs, write(tmp_path, wrapped), INT4 if kind == "int4" else QUARK)
    np.testing.assert_array_equal(dequantise_tree(params, str(want.dtype)), want)


def test_an_unquantised_checkpoint_keeps_its_specs(tmp_path):
    reader = write(tmp_path, {"a.weight": np.ones((4, 8), np.float32)})
    specs = {"a": spec("a.weight", 4, 8)}
    assert quantised_specs(specs, reader, {}) == (specs, ())


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("fp8", "weight_scale_inv", np.ones((1, 4), "f4"), r"weight_scale_inv has shape \(1, 4\)"),
        ("fp8", "weight_scale_inv", np.ones((), "f4"), r"weight_scale_inv has shape \(\)"),
        ("int4", "weight_scale", np.ones((32, 1), "f4"), r"weight_scale has shape \(32, 1\)"),
        ("mxfp4", "weight_scale", np.ones((32, 4), "u1"), r"weight_scale has shape \(32, 4\)"),
        ("int4", "weight_packed", np.ones((32, 4), "i4"), r"weight_packed has shape \(32, 4\)"),
        ("int4", "weight_shape", np.asarray([32, 60]), r"a\.weight_shape says \(32, 60\)"),
        ("int4", "weight_packed", np.ones((32, 8), "i8"), "weight_packed is stored as int64"),
        ("fp8", "weight", np.ones((32, 64), "f4"), "a.weight is stored as float32"),
        ("mxfp4", "weight_scale", np.ones((32, 2), "f4"), "weight_scale is stored as float32"),
        ("mxfp4", "weight", np.ones((32, 64), "f4"), "surplus a.weight_scale"),
        ("int4", "weight_scale", None, r"missing a\.weight_scale \(32, 2\)"),
        ("int4", "weight_zero_point", np.ones((4, 2), "i4"), "surplus a.weight_zero_point"),
    ],
)
def test_tensors_that_contradict_are_named(tmp_path, kind, name, value, message):
    tensors, config, _ = store(kind, "a", 32, 64)
    tensors[f"a.{name}"] = value
    reader = write(tmp_path, {name: t for name, t in tensors.items() if t is not None})
    with pytest.raises(CheckpointError, match=message):
        load(spec("a.weight", 32, 64), reader, config)


def test_scales_wider_than_bfloat16_are_kept_as_they_are(tmp_path):
    tensors, config, want = store("int4", "a", 32, 64)
    wide = tensors["a.weight_scale"].astype(np.float32) * np.float32(1.001)
    reader = write(tmp_path, {**tensors, "a.weight_scale": wide})
    params = load(spec("a.weight", 32, 64), reader, config)
    np.testing.assert_array_equal(params.scale, wide)
    np.testing.assert_allclose(dequantise_tree(params, "float32"), want * 1.001, rtol=1e-6)


def test_columns_that_do_not_divide_into_groups():
    with pytest.raises(CheckpointError, match=r"a\.weight: 48 columns .* groups of 32"):
        pack_specs(
            spec("a.weight", 8, 48), {"a.weight_packed": (8, 6)}, Quantisation("int4", (1, 32))
        )


def test_a_stack_stored_in_two_ways_is_refused():
    specs = stack([spec(f"{i}.weight", 8, 64) for i in range(2)], "layers")
    shapes = {"0.weight_packed": (8, 8), "0.weight_scale": (8, 2), "1.weight": (8, 64)}
    with pytest.raises(CheckpointError, match=r"1\.weight is not stored quantised.*'unroll'"):
        pack_specs(specs, shapes, Quantisation("int4", (1, 32)))
    one_by_one = pack_specs(list(specs.parts), shapes, Quantisation("int4", (1, 32)))
    assert [is_packed(leaf) for leaf in one_by_one] == [True, False]


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_codes_are_not_loaded_as_numbers(tmp_path, kind):
    """The values alone, in a checkpoint whose configuration does not speak of quantisation."""
    tensors, _, _ = store(kind, "a", 32, 64)
    reader = write(tmp_path, {"a.weight": tensors["a.weight"]})
    with pytest.raises(CheckpointError, match=r"a\.weight is stored as .* asked for"):
        hf.load_params(spec("a.weight", *reader.shapes["a.weight"]), reader)


def test_as_held():
    codes = np.asarray([0.5, -2], ml_dtypes.float8_e4m3fn)
    assert as_held(codes, np.dtype("u1"), "a").tolist() == [0x30, 0xC0]
    assert as_held(codes, codes.dtype, "a") is codes
    assert as_held(np.asarray([3]), np.dtype("int32"), "a").dtype == np.int32
    bits = as_held(np.asarray([1, -2], ml_dtypes.bfloat16), np.dtype("u2"), "a")
    assert bits.tolist() == [0x3F80, 0xC000]
    half = as_held(np.asarray([1.5], "f4"), np.dtype(ml_dtypes.bfloat16), "a")
    assert half.dtype == ml_dtypes.bfloat16
    for array, dtype in [(codes, "float32"), (np.ones(1, "f4"), "u1"), (np.ones(1, "u1"), "f4")]:
        with pytest.raises(CheckpointError, match="a is stored as"):
            as_held(array, np.dtype(dtype), "a")
    with pytest.raises(CheckpointError, match="float8_e5m2"):
        as_held(np.ones(1, ml_dtypes.float8_e5m2), np.dtype("u1"), "a")


@pytest.mark.torch
def test_float8_files_of_torch_are_read_slice_by_slice(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    w = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    stored = {"z": torch.ones(3), "a": w.to(torch.float8_e4m3fn), "b": w.to(torch.float8_e5m2)}
    save_torch(stored, tmp_path / "model.safetensors")
    reader = hf.TensorReader(tmp_path)
    for name in "ab":
        part = reader.read(name, (slice(2, 7), slice(1, 4)))
        want = stored[name].float().numpy()
        np.testing.assert_array_equal(part.astype(np.float32), want[2:7, 1:4])
        np.testing.assert_array_equal(reader.read(name).astype(np.float32), want)
