"""Building a target from a published configuration, and loading it from a checkpoint."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specjax.core.errors import CheckpointError, nearest
from specjax.io.hf import TensorReader, load_params, read_config, read_stop_ids, resolve
from specjax.io.quant import dequantise_tree, quantised_specs, quantization_method
from specjax.targets import deepseek_v3, gemma4, llama, minimax_m2, qwen3, qwen3_5, qwen3_moe
from specjax.targets.base import Family, Target
from specjax.targets.config import TargetConfig

# By `model_type` of the text model.
FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_5_moe_text": qwen3_5.FAMILY,
    "gemma4_text": gemma4.FAMILY,
    "gemma4_unified_text": gemma4.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "kimi_k2": deepseek_v3.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
}
# Towers of multimodal wrappers; only the text model is read.
TOWERS = (
    "model.visual.*",
    "model.vision_tower.*",
    "model.vision_embedder.*",
    "model.embed_vision.*",
    "model.audio_tower.*",
    "model.embed_audio.*",
    "vision_tower.*",
    "mm_projector.*",
)

_log = logging.getLogger(__name__)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's configuration, out of a multimodal wrapper's where it is one.

    What the wrapper alone says (stop tokens, tied embeddings, quantisation) is kept.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    kept = ("tie_word_embeddings", "quantization_config")
    outer = {name: config[name] for name in kept if config.get(name) is not None}
    stops: set[int] = set()
    for found in (config.get("eos_token_id"), inner.get("eos_token_id")):
        stops |= set() if found is None else {found} if isinstance(found, int) else set(found)
    text = {**outer, **{name: value for name, value in inner.items() if value is not None}}
    return {**text, "eos_token_id": sorted(stops)}


def from_config(config: Mapping[str, Any], how: TargetConfig | None = None) -> Target:
    """Build a target from a published configuration.

    Args:
        config: a `config.json`, of a text model or of a multimodal wrapper.
        how: how it is run.

    Raises:
        CheckpointError: the `model_type` is missing or not one of FAMILIES.
    """
    how = how or TargetConfig()
    text = text_config(config)
    packed = how.weights == "packed" and quantization_method(config) is not None
    kind = text.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"config.json: model_type {kind!r} is not supported; have {known}"
            + nearest(str(kind), FAMILIES)
        )
    family = FAMILIES[kind]
    loop = how.layer_loop
    if loop == "auto":
        loop = "scan" if packed else "unroll"
    read = dataclasses.replace(family.read_config(text), layer_loop=loop, attention=how.attention)
    return Target(family=family, config=read)


def load(
    path: str | Path,
    dtype: str = "float32",
    shardings: Any | None = None,
    how: TargetConfig | None = None,
    layers: bool = True,
) -> tuple[Target, Any]:
    """Load a published checkpoint: a directory, or a hub id where there is a network.

    Args:
        path: Hugging Face directory, `hf://owner/name` or `owner/name`.
        dtype: dtype of the weights in memory.
        shardings: as in `io.hf.load_params`.
        how: how it is held in memory and run.
        layers: False reads only what heads borrow (`heads.base.borrow`): nothing can be run.

    Returns:
        (target, params).

    Raises:
        CheckpointError: anything wrong with the directory, named.
    """
    root = resolve(path)
    config = read_config(root)
    stops = read_stop_ids(root, text_config(config))
    target = from_config({**text_config(config), "eos_token_id": list(stops)}, how)
    reader = TensorReader(root)
    _tell_skipped(reader.shapes, root)
    specs, parts = quantised_specs(target.specs(), reader, config)
    ignored = (*TOWERS, *target.ignored, *parts)
    if not layers:
        specs, ignored = specs.replace(layers=(), extra=None), ("*",)
    params = load_params(specs, reader, dtype, shardings, ignore=ignored)
    if how is not None and how.weights == "dequantised":
        params = dequantise_tree(params, dtype)
    return target, params


def _tell_skipped(names: Iterable[str], root: Path) -> None:
    """Say which towers of a multimodal checkpoint are not read."""
    towers = [p.removesuffix(".*") for n in names for p in TOWERS if fnmatch.fnmatch(n, p)]
    if towers:
        counted = ", ".join(f"{n} of {p}" for p, n in collections.Counter(towers).items())
        _log.warning("%s: text model only; tensors skipped: %s", root.name, counted)
