"""Hugging Face directories: configuration, one or many safetensors files, read slice by slice."""

from __future__ import annotations

import fnmatch
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.core.errors import CheckpointError
from specjax.core.params import ParamSpec, leaves_with_names, map_specs
from specjax.io.names import views
from specjax.io.quant import as_held, float8_tensors

PyTree = Any
_INDEX = "model.safetensors.index.json"


def resolve(path: str | Path) -> Path:
    """Return a local directory for a path, `hf://owner/name` or a hub id.

    Hub ids are fetched through `huggingface_hub`; a failure there is one CheckpointError.
    """
    text = str(path)
    if Path(text).expanduser().is_dir():
        return Path(text).expanduser()
    hub = text.removeprefix("hf://")
    if Path(text).exists():
        raise CheckpointError(f"{text} is a file; a checkpoint is a directory with config.json")
    if text.startswith((".", "/", "~")) or hub.count("/") != 1:
        raise CheckpointError(f"no checkpoint directory at {text}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # the hub raises many kinds; all mean the same to a user
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{text} is neither a directory here nor could it be fetched from the hub ({reason})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing or malformed file is one CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_config(path: str | Path) -> dict[str, Any]:
    """Read `config.json` of a checkpoint directory."""
    return read_json(Path(path) / "config.json")


def read_stop_ids(path: str | Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the stop ids: those of generation_config.json, else of config.json, sorted."""
    found: set[int] = set()
    generation = Path(path) / "generation_config.json"
    for source in (read_json(generation) if generation.exists() else {}, config):
        stops = source.get("eos_token_id")
        found |= set() if stops is None else {stops} if isinstance(stops, int) else set(stops)
        if found:
            break
    return tuple(sorted(found))


class TensorReader:
    """Tensors of a directory (one file, or many with an index) or of a single file.

    Attributes:
        path: the directory or file, for messages.
        shapes: name to shape, by the names of a text-only checkpoint with one tensor per expert,
            whichever way the files put it (`io.names`).
    """

    def __init__(self, path: str | Path) -> None:
        """Open the files and read their headers only.

        Raises:
            CheckpointError: no weights, a missing shard, or a truncated or corrupt file.
        """
        self.path = Path(path)
        self._files: dict[str, Any] = {}
        self._float8: dict[str, np.ndarray] = {}
        self._stored: dict[str, tuple[int, ...]] = {}
        for file in self._list_files():
            try:
                handle = safe_open(file, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is truncated or corrupt ({error})") from None
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                self._files[name] = handle
                self._stored[name] = tuple(handle.get_slice(name).get_shape())
            self._float8 |= float8_tensors(file)
        self._views = views(self._stored)
        self.shapes = {n: view.shape(self._stored[view.name]) for n, view in self._views.items()}

    def _list_files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        if (index := self.path / _INDEX).exists():
            shards = sorted(set(read_json(index).get("weight_map", {}).values()))
            missing = [name for name in shards if not (self.path / name).exists()]
            if missing:
                raise CheckpointError(f"{self.path}: the index names {', '.join(missing)}, missing")
            return [self.path / name for name in shards]
        if (single := self.path / "model.safetensors").exists():
            return [single]
        raise CheckpointError(f"{self.path} has neither model.safetensors nor {_INDEX}")

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read one tensor, or the part of it that `index` selects."""
        view = self._views[name]
        part = view.part(self._stored[view.name], index)
        if view.name in self._float8:
            return np.array(self._float8[view.name][part])
        whole = self._files[view.name].get_slice(view.name)
        return np.asarray(whole[part] if part else whole[:] if whole.get_shape() else whole[...])

    def published(self, name: str) -> str:
        """Return the name that the files give a tensor, or would give it."""
        return self._views[name].name if name in self._views else name


def check_names(
    specs: PyTree, found: Mapping[str, tuple[int, ...]], where: str, ignore: Iterable[str] = ()
) -> None:
    """Name every missing, surplus and misshapen tensor in one CheckpointError."""
    wanted = {
        tensor.hf: tensor.shape
        for _, spec in leaves_with_names(specs)
        for tensor in spec.published()
    }
    patterns = tuple(ignore)
    faults = [f"missing {name} {shape}" for name, shape in wanted.items() if name not in found]
    faults += [
        f"{name} has shape {found[name]}, the configuration asks for {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    faults += [
        f"surplus {name} {shape}"
        for name, shape in found.items()
        if name not in wanted and not any(fnmatch.fnmatch(name, p) for p in patterns)
    ]
    if faults:
        raise CheckpointError(f"{where}: {len(faults)} tensors do not fit: " + "; ".join(faults))


def load_params(
    specs: PyTree,
    source: TensorReader | str | Path,
    dtype: str = "float32",
    shardings: Any | None = None,
    *,
    ignore: Iterable[str] = (),
) -> PyTree:
    """Fill a spec tree from published tensors, each read once, straight to where it lives.

    Args:
        specs: tree of ParamSpec.
        source: a TensorReader, or the path of one.
        dtype: dtype in memory for leaves whose spec fixes none.
        shardings: None (default device), one sharding for all, a tree like `specs`, or a function
            that makes such a tree of `specs` (`core.sharding.Layout.weights`). A sharded leaf is
            read slice by slice, so no host ever holds it whole.
        ignore: shell patterns of tensors that may be surplus.

    Raises:
        CheckpointError: tensors that are missing, surplus or misshapen, all named at once.
    """
    reader = source if isinstance(source, TensorReader) else TensorReader(source)
    check_names(specs, reader.shapes, str(reader.path), ignore)

    def load(spec: ParamSpec, sharding: jax.sharding.Sharding | None) -> jax.Array:
        kind = jnp.dtype(spec.dtype or dtype)
        if sharding is None:
            return jnp.asarray(_read(reader, spec, None, kind))
        return jax.make_array_from_callback(
            spec.shape, sharding, lambda index: _read(reader, spec, index, kind)
        )

    if callable(shardings):
        shardings = shardings(specs)
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return map_specs(lambda spec: load(spec, shardings), specs)
    return map_specs(load, specs, shardings)


def _read(
    reader: TensorReader, spec: ParamSpec, index: tuple[slice, ...] | None, dtype: np.dtype
) -> np.ndarray:
    """Read a weight, or a part of it, from the published tensors it is made of."""
    if not spec.parts:
        return as_held(reader.read(spec.hf, index), dtype, reader.published(spec.hf))
    first, rest = (slice(None), None) if not index else (index[0], tuple(index[1:]))
    parts = spec.parts[first]
    head = _read(reader, parts[0], rest, dtype)
    out = np.empty((len(parts), *head.shape), dtype)
    out[0] = head
    for row, part in zip(out[1:], parts[1:], strict=True):
        row[...] = _read(reader, part, rest, dtype)
    return out


def export_tensors(
    specs: PyTree, params: PyTree, dtype: str | None = None
) -> dict[str, np.ndarray]:
    """Return {published name: array} of a parameter tree, cast to `dtype` if given."""
    out: dict[str, np.ndarray] = {}

    def take(spec: ParamSpec, value: jax.Array) -> None:
        kind = spec.dtype or dtype
        array = np.asarray(jax.device_get(value))
        split(spec, array if kind is None else array.astype(jnp.dtype(kind)))

    def split(spec: ParamSpec, array: np.ndarray) -> None:
        if not spec.parts:
            out[spec.hf] = array
        for part, row in zip(spec.parts, array, strict=False):
            split(part, row)

    map_specs(take, specs, params)
    return out


def write_safetensors(
    tensors: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        CheckpointError: the disk is full or not writable; nothing is left behind.
    """
    partial = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        ordered = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        save_file(ordered, partial, {"format": "pt", **(metadata or {})})
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    finally:
        if partial:
            Path(partial).unlink(missing_ok=True)


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """Write a JSON object whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    finally:
        if partial.parent.is_dir():
            partial.unlink(missing_ok=True)


def save_checkpoint(
    specs: PyTree,
    params: PyTree,
    config: Mapping[str, Any],
    path: str | Path,
    dtype: str | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` under the published names.

    Args:
        specs: tree of ParamSpec.
        params: tree of arrays.
        config: what `config.json` will hold.
        path: directory, made if needed.
        dtype: dtype on disk, None to keep each array's.
        extra: further tensors, such as a draft vocabulary's maps.
    """
    root = Path(path)
    tensors = {**export_tensors(specs, params, dtype), **(extra or {})}
    write_safetensors(tensors, root / "model.safetensors")
    write_json(config, root / "config.json")
