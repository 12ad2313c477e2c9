"""Quantised checkpoints: what the configuration says, and which tensors make up a weight.

Which weights are packed goes by what is stored, so that modules a release leaves out (`lm_head`,
attention, single layers) need no list. Activations are not quantised here, whatever a
configuration says of them. What the layouts mean stands in `core.packed`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core.errors import CheckpointError
from specjax.core.packed import MX_GROUP, BlockFp8, GroupInt4, Mxfp4, Packed, is_packed
from specjax.core.params import ParamSpec, is_spec, map_specs, stack

if TYPE_CHECKING:
    from specjax.io.hf import TensorReader

PyTree = Any
_SUPPORTED = (
    "fp8 (e4m3) with weight_block_size, compressed-tensors pack-quantized (int4, symmetric, "
    "groups), quark mxfp4"
)
_MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": MX_GROUP, "scale_format": "e8m0"}
_FLOAT8 = {"F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2, "F8_E8M0": jnp.float8_e8m0fnu}

_BITS: dict[np.dtype, np.dtype] = {
    np.dtype(jnp.float8_e4m3fn): np.dtype(np.uint8),
    np.dtype(jnp.bfloat16): np.dtype(np.uint16),
}


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's packed weights are stored.

    Attributes:
        method: which layout of `core.packed`.
        block: rows and columns of a weight that share a scale.
        scale_dtype: dtype in memory of the scales of "fp8" and "int4"; uint16 for the bits of
            bfloat16.
    """

    method: Literal["fp8", "int4", "mxfp4"]
    block: tuple[int, int]
    scale_dtype: str = "float32"


def quantization_method(config: Mapping[str, Any]) -> Quantisation | None:
    """Read how a `config.json` says its weights are quantised, None if it does not.

    Args:
        config: the object, with `quantization_config` at its root or in its `text_config`.

    Raises:
        CheckpointError: a method or a variant that is not supported; names it and those that are.
    """
    text = config.get("text_config") or {}
    stated = config.get("quantization_config") or text.get("quantization_config")
    if not stated:
        return None
    method = stated.get("quant_method")
    readers = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "quark": _quark}
    if method not in readers:
        raise _unsupported(f"quant_method {method!r}")
    return readers[method](stated)


def _unsupported(what: str) -> CheckpointError:
    return CheckpointError(
        f"quantization_config: {what} is not supported; supported are {_SUPPORTED}"
    )


def _expect(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Refuse settings other than the wanted ones."""
    for key, value in wanted.items():
        if found.get(key) != value:
            raise _unsupported(f"{where}{key} {found.get(key)!r}")


def _fp8(stated: Mapping[str, Any]) -> Quantisation:
    block = stated.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or min(block) < 1:
        raise _unsupported(f"fp8 with weight_block_size {block!r}")
    wanted = {"fmt": "e4m3", "activation_scheme": "dynamic"}
    found = {**wanted, **stated}
    if found["fmt"] == "float8_e4m3fn":  # MiniMax's word for it
        found["fmt"] = "e4m3"
    _expect(found, wanted, "fp8 with ")
    return Quantisation("fp8", (block[0], block[1]))


def _compressed_tensors(stated: Mapping[str, Any]) -> Quantisation:
    defaults = {"type": "int", "symmetric": True}
    sizes = []
    for name, group in (stated.get("config_groups") or {}).items():
        where = f"compressed-tensors {name}: "
        if not (weights := group.get("weights")):
            continue  # about activations alone
        stored = group.get("format") or stated.get("format")
        _expect({"format": stored}, {"format": "pack-quantized"}, where)
        wanted = {"num_bits": 4, **defaults, "strategy": "group"}
        _expect({**defaults, **weights}, wanted, f"{where}weights ")
        # "weight" ("static") leaves the columns where they were, "group" stores their order.
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise _unsupported(f"{where}weights actorder {weights['actorder']!r}")
        sizes.append(weights.get("group_size"))
    if not sizes or any(size != sizes[0] for size in sizes):
        raise _unsupported(f"compressed-tensors with group sizes {sizes}")
    if not isinstance(sizes[0], int) or sizes[0] < 8 or sizes[0] % 8:
        raise _unsupported(f"compressed-tensors with group_size {sizes[0]!r}")
    return Quantisation("int4", (1, sizes[0]))


def _quark(stated: Mapping[str, Any]) -> Quantisation:
    def check(name: str, part: Any) -> None:
        weight = (part or {}).get("weight")
        if not isinstance(weight, Mapping):
            raise _unsupported(f"quark {name} with weight {weight!r}")
        _expect(weight, _MX, f"quark {name} with weight ")

    check("global_quant_config", stated.get("global_quant_config"))
    for table in ("layer_quant_config", "layer_type_quant_config"):
        for name, part in (stated.get(table) or {}).items():
            if part and part.get("weight") is not None:  # else left as it is
                check(name, part)
    real = {"weight_format": "real_quantized"}
    _expect({**real, **(stated.get("export") or {})}, real, "quark export with ")
    return Quantisation("mxfp4", (1, MX_GROUP))


def quantised_specs(
    specs: PyTree, reader: TensorReader, config: Mapping[str, Any]
) -> tuple[PyTree, tuple[str, ...]]:
    """Return the specs as a checkpoint stores them, and patterns of tensors that may be surplus.

    Args:
        specs: tree of ParamSpec, leaves stacked or not.
        reader: the checkpoint.
        config: its `config.json`.

    Raises:
        CheckpointError: an unsupported method, or stored tensors that contradict it.
    """
    if (quantisation := quantization_method(config)) is None:
        return specs, ()
    if quantisation.method == "int4":
        scales = (name for name in reader.shapes if name.endswith(".weight_packed"))
        first = next(scales, "").removesuffix("packed") + "scale"
        if reader.shapes.get(first):
            dtype = _stored_dtype(reader, first)
            held = _BITS.get(dtype, dtype).name
            quantisation = dataclasses.replace(quantisation, scale_dtype=held)
    packed = pack_specs(specs, reader.shapes, quantisation)
    return packed, check_stored(packed, reader)


def pack_specs(
    specs: PyTree, shapes: Mapping[str, tuple[int, ...]], quantisation: Quantisation
) -> PyTree:
    """Replace the specs of weights that are stored quantised by packed leaves of specs.

    Args:
        specs: tree of ParamSpec, leaves stacked or not.
        shapes: name to shape of what is stored.
        quantisation: how it is.

    Returns:
        The tree, its packed leaves holding the ParamSpecs of the tensors they are stored in, which
        the loader treats like any others.

    Raises:
        CheckpointError: a stack of weights that are stored in different ways, or columns that do
            not divide into groups.
    """

    def pack(spec: ParamSpec) -> ParamSpec | Packed:
        if not spec.parts:
            return _pack_one(spec, shapes, quantisation)
        parts = [pack(part) for part in spec.parts]
        kinds = [is_packed(part) for part in parts]
        if not any(kinds):
            return spec
        if not all(kinds):
            plain = next(p for p, k in zip(spec.parts, kinds, strict=True) if not k)
            raise CheckpointError(
                f"{plain.hf} is not stored quantised, others of its stack are; load with "
                "layer_loop 'unroll', where each layer has its own arrays"
            )
        axis = str(spec.axes[0])  # a stack's leading axis has a name
        return map_specs(lambda *each: stack(each, axis), *parts)

    return map_specs(pack, specs)


def _pack_one(
    spec: ParamSpec, shapes: Mapping[str, tuple[int, ...]], quantisation: Quantisation
) -> ParamSpec | Packed:
    """Return the packed leaf of a published weight, the spec itself if it is stored as it is."""
    if not spec.hf.endswith(".weight") or len(spec.shape) != 2:
        return spec
    (out, width), (rows, columns) = spec.shape, quantisation.block
    inner, scales = (out, width // columns), spec.hf + "_scale"

    def part(hf: str, shape: tuple[int, ...], dtype: str, **changes: Any) -> Any:
        return dataclasses.replace(spec, hf=hf, shape=shape, dtype=dtype, **changes)

    if quantisation.method == "fp8":
        if spec.hf + "_scale_inv" not in shapes:
            return spec
        # Few, and seldom as many as a mesh divides evenly: each device holds all of a layer's.
        scale = part(
            spec.hf + "_scale_inv",
            (-(-out // rows), -(-width // columns)),
            quantisation.scale_dtype,
            axes=(None, None),
            init="ones",
        )
        return BlockFp8(part(spec.hf, spec.shape, "uint8", init="zeros"), scale, (rows, columns))
    int4 = quantisation.method == "int4"
    stored = spec.hf + "_packed" if int4 else scales
    if stored not in shapes or (not int4 and shapes.get(spec.hf) == spec.shape):
        return spec
    if width % columns:
        raise CheckpointError(f"{spec.hf}: {width} columns do not divide into groups of {columns}")
    if int4:
        return GroupInt4(
            part(stored, (out, width // 8), "int32", init="zeros"),
            part(scales, inner, quantisation.scale_dtype, init="ones"),
        )
    return Mxfp4(
        part(spec.hf, (out, width // 2), "uint8", init="zeros"),
        part(scales, inner, "uint8", init="ones"),
    )


def check_stored(specs: PyTree, reader: TensorReader) -> tuple[str, ...]:
    """Compare packed leaves with dtypes and `weight_shape` tensors, which are not kept.

    Args:
        specs: tree with packed leaves of specs.
        reader: the checkpoint.

    Returns:
        Patterns of the tensors that were only looked at.

    Raises:
        CheckpointError: names every contradiction.
    """
    faults = []
    leaves = [leaf for leaf in jax.tree.leaves(specs, is_leaf=is_packed) if is_packed(leaf)]
    tensors = [
        tensor
        for leaf in leaves
        for spec in jax.tree.leaves(leaf, is_leaf=is_spec)
        for tensor in spec.published()
    ]
    for tensor in tensors:
        if reader.shapes.get(tensor.hf) != tensor.shape:
            continue  # the loader names what is missing or misshapen
        stored = _stored_dtype(reader, tensor.hf)
        if not _holds(stored, jnp.dtype(tensor.dtype)):
            faults.append(f"{reader.published(tensor.hf)} is stored as {stored}")
        base = tensor.hf.removesuffix("_packed")
        if base != tensor.hf and f"{base}_shape" in reader.shapes:
            says = tuple(np.ravel(reader.read(f"{base}_shape")).tolist())
            if says != (asks := (tensor.shape[0], tensor.shape[1] * 8)):
                name = reader.published(f"{base}_shape")
                faults.append(f"{name} says {says}, the configuration asks for {asks}")
    if faults:
        raise CheckpointError(f"{reader.path}: packed weights do not fit: " + "; ".join(faults))
    return ("*.weight_shape",) if any(isinstance(leaf, GroupInt4) for leaf in leaves) else ()


def _stored_dtype(reader: TensorReader, name: str) -> np.dtype:
    return reader.read(name, (slice(0, 0),)).dtype


def _holds(stored: np.dtype, held: np.dtype) -> bool:
    """Whether a stored tensor keeps its value in the dtype held in memory."""
    if _is_number(stored) and _is_number(held):
        return jnp.promote_types(stored, held) == held
    return held in (stored, _BITS.get(stored))


def _is_number(dtype: np.dtype) -> bool:
    """Whether values of this dtype are meant as they stand: floats wider than a byte."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize > 1


def as_held(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Bring a tensor that was read to its dtype in memory.

    float8_e4m3fn and bfloat16 become their bits where unsigned integers of their width are asked
    for; numbers, and integers, are converted among themselves. Codes are never taken for numbers.

    Raises:
        CheckpointError: any other pair of dtypes.
    """
    if _BITS.get(array.dtype) == dtype:
        return array.view(dtype)
    kinds = [(_is_number(kind), kind.kind in "iub") for kind in (array.dtype, dtype)]
    if array.dtype != dtype and (kinds[0] != kinds[1] or not any(kinds[0])):
        raise CheckpointError(
            f"{name} is stored as {array.dtype}, {dtype} is asked for: a quantised tensor without "
            "its scale, or a configuration without its quantization_config?"
        )
    return array.astype(dtype, copy=False)


def float8_tensors(file: Path) -> dict[str, np.ndarray]:
    """Map the float8 tensors of a safetensors file, which safetensors cannot hand to numpy.

    Returns:
        Name to array; the bytes are read where an array is indexed.
    """
    with file.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
    header.pop("__metadata__", None)
    found = {name: entry for name, entry in header.items() if entry["dtype"] in _FLOAT8}
    if not found:
        return {}
    data = np.memmap(file, np.uint8, "r", offset=8 + size)
    return {
        name: data[slice(*entry["data_offsets"])]
        .view(_FLOAT8[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in found.items()
    }


def dequantise_tree(params: PyTree, dtype: str) -> PyTree:
    """Unpack the packed leaves of a parameter tree, each where it lies, and leave the others."""
    unpack = jax.jit(lambda leaf: leaf.dequantise(dtype))
    return jax.tree.map(
        lambda leaf: unpack(leaf) if is_packed(leaf) else leaf, params, is_leaf=is_packed
    )
