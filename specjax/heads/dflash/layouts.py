"""Released DFlash and DSpark checkpoints: z-lab, DeepSpec and speculators.

All store the same tensor names, so that a layout is what `config.json` says, and says differently:

- which position a slot predicts: z-lab its own, DeepSpec the next one, whether or not the head has
  DSpark's parts (its DFlash is a DSpark with `markov_rank` 0); speculators states it.
- tapped layers: id l of z-lab and DeepSpec is the output of layer l, residual stream l + 1;
  speculators' ids are residual streams.
- windows: z-lab counts back from each slot, speculators from the anchor for all of a block.

Everything that can be wrong between a head and a target is refused here, before anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from specjax.core.errors import CheckpointError, ConfigError, PairingError
from specjax.core.published import required
from specjax.heads import pairing
from specjax.heads.base import Borrowed
from specjax.heads.dflash.config import DFlashConfig, LayerType, Layout
from specjax.heads.dflash.fit import check_taps, settled
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.dflash.network import DFlashWeights
from specjax.heads.dflash.writing import TEMPERATURES, write_config
from specjax.heads.released import (
    Shapes,
    check_sizes,
    read_geometry,
    read_layer_types,
    read_vocabulary,
    save_head,
)
from specjax.heads.vocabulary import check_maps
from specjax.io.hf import TensorReader, read_config, resolve
from specjax.layers.blocks.geometry import Gemma4Geometry
from specjax.targets.base import TargetInfo

_SPECULATORS = ("dflash", "dspark")
# Parts of architectures that go by the name of DFlash and are others.
_FOREIGN = ("qkv_proj", "g_proj", "aux_hidden_norms", "_conv.", "candidate_selector")


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """Tell the layout from a `config.json`; None if it is none that is known."""
    if "speculators_model_type" in config:
        return "speculators" if config["speculators_model_type"] in _SPECULATORS else None
    for name in config.get("architectures") or ():
        if name == "DFlashDraftModel":
            return "zlab"
        if name in ("Qwen3DSparkModel", "Gemma4DSparkModel"):
            return "deepspec"
    return None


def recognises(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a block head, readable or not."""
    if "speculators_model_type" in config:
        return config["speculators_model_type"] in _SPECULATORS
    names = " ".join(config.get("architectures") or ())
    return "DFlash" in names or "DSpark" in names or "dflash_config" in config


def load(
    path: str | Path,
    info: TargetInfo,
    dtype: str = "float32",
    shardings: Any | None = None,
    borrowed: Borrowed | None = None,
) -> tuple[DFlashHead, DFlashWeights]:
    """Load a released head for a target.

    Args:
        path: directory or hub id.
        info: facts of the target it shall serve.
        dtype: dtype in memory.
        shardings: as in `io.hf.load_params`.
        borrowed: the target's embedding and output layer; what is stored without them needs them.

    Raises:
        PairingError: head and target do not belong together, or a draft vocabulary has no map.
        CheckpointError: a malformed checkpoint; tensors that do not fit are all named.
    """
    root = resolve(path)
    config, reader = read_config(root), TensorReader(root)
    shapes = pairing.with_lent(config, reader.shapes, str(root))
    head = read_head(config, shapes, info, str(root))
    params = pairing.load(head.specs(), reader, config, dtype, shardings, borrowed)
    if head.mapped:
        check_maps(params.d2t, params.t2d, str(root))
    return head, params


def save(
    head: DFlashHead, params: DFlashWeights, path: str | Path, dtype: str | None = None
) -> None:
    """Write a head in its layout, whole or not at all.

    Args:
        head: the head.
        params: its weights.
        path: directory, made if needed.
        dtype: dtype on disk, None to keep the weights'.

    Raises:
        PairingError: the draft vocabulary's maps contradict each other.
        ConfigError: the layout has no words for what the head is.
    """
    if head.mapped:
        check_maps(params.d2t, params.t2d, str(path))
    save_head(head.specs(), params, write_config(head), path, dtype)


def read_head(
    config: Mapping[str, Any], shapes: Shapes, info: TargetInfo, where: str = "the head"
) -> DFlashHead:
    """Build a head from a released configuration and the shapes of its tensors.

    Args:
        config: `config.json`.
        shapes: shape of each stored tensor.
        info: facts of the target.
        where: names the head in messages.

    Raises:
        PairingError: the head cannot serve this target.
        CheckpointError: the configuration asks for what no reader here understands.
    """
    layout = layout_of(config)
    if layout is None:
        raise CheckpointError(
            f"{where}: architectures {config.get('architectures')} is no DFlash layout that is"
            " known; have DFlashDraftModel, Qwen3DSparkModel, Gemma4DSparkModel and speculators'"
            f" model types {', '.join(_SPECULATORS)}"
        )
    _refuse_foreign(config, shapes, where)
    body = config.get("transformer_layer_config") or {} if layout == "speculators" else config
    geometry = read_geometry(body, shapes, "layers.0.", where)
    _check_target(config, body, info, where)
    target_hidden = config.get("target_hidden_size") or geometry.hidden
    own_embedding, own_output = (f"{n}.weight" in shapes for n in ("embed_tokens", "lm_head"))
    draft_vocab, mapped = read_vocabulary(config, shapes, info.vocab, where)
    borrows = not (own_embedding and own_output)
    fewer = not own_output and draft_vocab != info.vocab
    if borrows and (geometry.hidden != info.hidden or fewer):
        raise PairingError(
            f"{where} does not store both embed_tokens.weight and lm_head.weight, and the target's"
            f" [{info.vocab}, {info.hidden}] are not its [{draft_vocab}, {geometry.hidden}]"
        )
    settings = _settings(layout, config, body, info, where)
    check_taps(settings, info)
    if isinstance(geometry, Gemma4Geometry):
        if layout != "deepspec":
            raise CheckpointError(f"{where}: Gemma 4 layers in {layout} layout are not supported")
        settings = dataclasses.replace(settings, body="gemma4")
    scale, cap = (_stated(config, n) for n in ("input_embedding_scale", "final_logit_softcapping"))
    return DFlashHead(
        geometry=geometry,
        config=_keeping_flags(settings, settled(settings, geometry)),
        vocab=info.vocab,
        draft_vocab=draft_vocab,
        target_hidden=target_hidden,
        mapped=mapped,
        own_embedding=own_embedding,
        own_output=own_output,
        target_layers=info.num_layers,
        embed_scale=info.embed_scale if scale is None else float(scale),
        softcap=info.softcap if cap is None else float(cap),
        temperatures=tuple(float(t) for t in config.get(TEMPERATURES) or ()),
        max_context=body.get("max_position_embeddings") or 0,
    )


def _keeping_flags(read: DFlashConfig, tidy: DFlashConfig) -> DFlashConfig:
    """Keep the causal flag as it was read, also where it says nothing (F40)."""
    return dataclasses.replace(tidy, causal=read.causal)


def _stated(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a field from `dflash_config` or from the top level: revisions differ in the place."""
    nested = config.get("dflash_config") or {}
    value = nested.get(name)
    value = config.get(name) if value is None else value
    return default if value is None else value


def _refuse_foreign(config: Mapping[str, Any], shapes: Shapes, where: str) -> None:
    """Refuse other networks under the same name."""
    if other := [name for name in shapes if any(part in name for part in _FOREIGN)]:
        raise CheckpointError(
            f"{where} stores {other[0]}: another architecture than DFlash, which has q_proj,"
            " k_proj, v_proj and o_proj"
        )
    if _stated(config, "output_multiplier", 1.0) != 1.0:
        raise CheckpointError(f"{where}: dflash_config.output_multiplier is not supported")


def _check_target(
    config: Mapping[str, Any], body: Mapping[str, Any], info: TargetInfo, where: str
) -> None:
    (hidden,) = required(body, "hidden_size")
    check_sizes(config.get("target_hidden_size") or hidden, body.get("vocab_size"), info, where)
    layers = config.get("num_target_layers")
    if layers is not None and layers != info.num_layers:
        raise PairingError(
            f"{where} is for a target of {layers} layers (num_target_layers), this one has"
            f" {info.num_layers}"
        )


def _settings(
    layout: Layout,
    config: Mapping[str, Any],
    body: Mapping[str, Any],
    info: TargetInfo,
    where: str,
) -> DFlashConfig:
    """Read what is not the layers' sizes."""
    (layers,) = required(body, "num_hidden_layers")
    types = read_layer_types(body, layers, where)
    if layout == "deepspec" and "sliding" in types:
        raise CheckpointError(f"{where}: sliding layers are not part of DeepSpec's layout")
    window = body.get("sliding_window") or 0 if "sliding" in types else 0
    if "sliding" in types and window < 1:
        raise CheckpointError(f"{where}: sliding layers need sliding_window, which is {window}")
    mask = _stated(config, "mask_token_id")
    if mask is None:
        raise CheckpointError(f"{where}: config.json lacks mask_token_id")
    if not 0 <= mask < info.vocab:
        raise PairingError(
            f"{where}: mask_token_id {mask} is not a token of the target, which has 0.."
            f"{info.vocab - 1}"
        )
    try:
        return DFlashConfig(
            taps=_taps(layout, config, where),
            block_size=_block_size(layout, config, where),
            sample_from_anchor=_from_anchor(layout, config),
            mask_token_id=mask,
            layers=layers,
            layer_types=cast(tuple[LayerType, ...], types),
            sliding_window=window,
            causal=_causal(layout, config),
            layout=layout,
            **_training_settings(layout, config),
            **_sequential_settings(layout, config),
        )
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _taps(layout: Layout, config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return the tapped residual streams, in transformers' numbering."""
    name = "aux_hidden_state_layer_ids" if layout == "speculators" else "target_layer_ids"
    ids = _stated(config, name)
    if not ids:
        raise CheckpointError(f"{where}: config.json lacks {name}")
    return tuple(ids) if layout == "speculators" else tuple(i + 1 for i in ids)


def _block_size(layout: Layout, config: Mapping[str, Any], where: str) -> int:
    """Return the block size; speculators' and z-lab's readers have a default for it."""
    defaults = {"speculators": 8, "zlab": 16, "deepspec": None}
    size = _stated(config, "block_size", defaults[layout])
    if size is None:
        raise CheckpointError(f"{where}: config.json lacks block_size")
    return int(size)


def _from_anchor(layout: Layout, config: Mapping[str, Any]) -> bool:
    if layout != "speculators":
        return layout == "deepspec"
    default = config["speculators_model_type"] == "dspark"
    return bool(config.get("sample_from_anchor", default))


def _causal(layout: Layout, config: Mapping[str, Any]) -> Any:
    """Return which layers are causal inside a block."""
    if layout == "speculators":
        return "none" if config.get("sliding_window_non_causal") else "sliding"
    flag = _stated(config, "is_causal") if layout == "zlab" else None
    return "sliding" if flag is None else "all" if flag else "none"


def _training_settings(layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what DeepSpec alone writes down of its training."""
    given = config.get("num_anchors") if layout == "deepspec" else None
    return {} if given is None else {"num_anchors": int(given)}


def _sequential_settings(layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read DSpark's parts; speculators' DSpark has all of them unless it says otherwise."""
    spelled = config.get("speculators_model_type") == "dspark"
    if layout == "zlab" or (layout == "speculators" and not spelled):
        return {}
    rank = int(_stated(config, "markov_rank", 256 if spelled else 0))
    confidence = bool(_stated(config, "enable_confidence_head", spelled))
    # What is not stated follows from the rest; what is stated is checked against it.
    with_markov = _stated(config, "confidence_head_with_markov", spelled and rank > 0)
    return {
        "markov_rank": rank,
        "markov_head": _stated(config, "markov_head_type", "vanilla") if rank else "vanilla",
        "confidence": confidence,
        "confidence_with_markov": bool(with_markov) and confidence,
    }
