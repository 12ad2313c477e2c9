"""Reading a fixture directory: configuration, manifest, inputs and what is expected."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.core.errors import CheckpointError
from specjax.io.hf import TensorReader, read_config, read_json

# Without a manifest nothing says which tensors the reference was given: those of the known kinds.
_USUAL_INPUTS = re.compile(
    r"((.*\.)?(input_ids|padded_input_ids|attention_mask|loss_mask|greedy_prompt|pos_idx"
    r"|temperature|draft_tokens|uniforms|stop_token_ids)"
    r"|([^.]*\.)?(?<!train\.)(draft_logits|target_logits)"
    r"|train\.target_(last_)?hidden_states|train\.packed\.(verifier_last_)?hidden_states"
    r"|infer\.(context_ids|context_hidden|anchor|verify_hidden|accepted|bonus))"
)


class Inputs(dict[str, np.ndarray]):
    """The inputs by name; asking for one that is not there is a CheckpointError."""

    def __missing__(self, name: str) -> np.ndarray:
        """Name the missing input."""
        raise CheckpointError(f"expected.safetensors lacks the input {name}")


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A fixture directory.

    Attributes:
        path: the directory.
        config: its `config.json`, {} where it has none (a fixture without a model).
        manifest: its own manifest, or its entry in the manifest beside the directories.
        meaning: what each tensor is, in words.
        inputs: the tensors the reference was given.
        expected: the reference's outputs, as far as they are there.
        outputs: names of all outputs that the manifest or the file names.
    """

    path: Path
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    meaning: Mapping[str, str]
    inputs: Inputs
    expected: Mapping[str, np.ndarray]
    outputs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.resolve().name

    def setting(self, *names: str, default: Any = None) -> Any:
        """Return the first of `names` in the manifest (or its `defaults`), then the config."""
        for source in (self.manifest, self.manifest.get("defaults", {}), self.config):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return default

    def number_in(self, tensor: str, pattern: str, default: float) -> float:
        """Return a number that the description of a tensor states, e.g. `kl_decay ([0-9.]+)`."""
        found = re.search(pattern, self.meaning.get(tensor, ""))
        return float(found[1]) if found else default


def read_fixture(directory: Path) -> Fixture:
    """Read a fixture directory; weights stay on disk.

    Raises:
        CheckpointError: no such directory, or a file that is missing, truncated or malformed.
    """
    if not directory.is_dir():
        raise CheckpointError(f"no fixture directory at {directory}")
    stored = directory / "expected.safetensors"
    if not stored.exists():
        raise CheckpointError(f"{directory} has no expected.safetensors (the fixture's inputs)")
    manifest, meaning, given, outputs = _read_manifest(directory)
    reader = TensorReader(stored)
    tensors = {name: reader.read(name) for name in reader.shapes}
    inputs = {name for name in tensors if (_is_usual(name) if given is None else name in given)}
    there = [name for name in tensors if name not in inputs]
    return Fixture(
        path=directory,
        config=read_config(directory) if (directory / "config.json").exists() else {},
        manifest=manifest,
        meaning=meaning,
        inputs=Inputs({name: tensors[name] for name in tensors if name in inputs}),
        expected={name: tensors[name] for name in there},
        outputs=tuple(dict.fromkeys([*outputs, *there])),
    )


def _is_usual(name: str) -> bool:
    return bool(_USUAL_INPUTS.fullmatch(name))


def _read_manifest(
    directory: Path,
) -> tuple[dict[str, Any], dict[str, str], set[str] | None, list[str]]:
    """Return (manifest, meanings, names of inputs or None if nothing says, names of outputs)."""
    own, beside = directory / "manifest.json", directory.resolve().parent / "manifest.json"
    if own.exists():
        manifest = read_json(own)
        tensors = manifest.get("expected_tensors", {})
        given = {name for name, entry in tensors.items() if entry.get("role") == "input"}
        meaning = {name: str(entry.get("what", "")) for name, entry in tensors.items()}
        return manifest, meaning, given if tensors else None, _without(tensors, given)
    if beside.exists():
        shared = read_json(beside)
        name = directory.resolve().name
        entry = next((f for f in shared.get("fixtures", []) if f.get("name") == name), {})
        given = set(shared["inputs"]) if "inputs" in shared else None
        outputs = _without(entry.get("tensors", []), given or set())
        return entry, shared.get("tensor_meaning", {}), given, outputs
    return {}, {}, None, []


def _without(names: Iterable[str], given: set[str]) -> list[str]:
    return [name for name in names if name not in given]
