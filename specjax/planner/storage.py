"""Weights as a release stores them, from its configuration alone: what to plan for without a file.

Which weights a quantised release packs is seen in its files; without these it follows from what
its configuration leaves out, and from what every such release does: embeddings, output layer and
routers stay as they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.io.hf import TensorReader
from specjax.io.quant import pack_specs, quantised_specs, quantization_method
from specjax.targets.loading import text_config

PyTree = Any
_NEVER = (r"(^|.*\.)embed_tokens$", r"(^|.*\.)lm_head$", r".*\.gate$", r".*\.shared_expert_gate$")
_SUFFIXES = (".weight_packed", ".weight_scale_inv", ".weight_scale")


class Stored(dict[str, tuple[int, ...]]):
    """The names that a release of some configuration stores, as far as packing asks for them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Read which modules are left out."""
        super().__init__()
        stated = config.get("quantization_config") or text_config(config)["quantization_config"]
        listed = [
            name
            for key in ("ignore", "modules_to_not_convert", "exclude")
            for name in stated.get(key) or ()
        ]
        self._left = [re.compile(pattern) for pattern in (*_NEVER, *map(_pattern, listed))]

    def __contains__(self, name: object) -> bool:
        """Whether a tensor of that name belongs to a packed weight."""
        text = str(name)
        suffix = next((s for s in _SUFFIXES if text.endswith(s)), None)
        if suffix is None:
            return False
        module = text.removesuffix(suffix)
        return not any(pattern.match(module) for pattern in self._left)


def _pattern(name: str) -> str:
    """Return the expression that a list of modules means: one of its own, a module, or its end."""
    if name.startswith("re:"):
        return name.removeprefix("re:")
    return rf"(^|.*\.){re.escape(name)}$"


def stored_specs(specs: PyTree, config: Mapping[str, Any], directory: Path | None) -> PyTree:
    """Return the specs as a checkpoint stores them.

    Args:
        specs: of the target.
        config: its `config.json`.
        directory: where its files are, if there are any.

    Raises:
        CheckpointError: a quantisation that is not supported.
    """
    if (quantisation := quantization_method(config)) is None:
        return specs
    if directory is not None and any(directory.glob("*.safetensors*")):
        return quantised_specs(specs, TensorReader(directory), config)[0]
    if quantisation.method == "int4":
        # The scales of these releases are bfloat16, of which the bits are held.
        quantisation = dataclasses.replace(quantisation, scale_dtype="uint16")
    return pack_specs(specs, Stored(config), quantisation)
