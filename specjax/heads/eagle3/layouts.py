"""Released EAGLE-3 checkpoints: SafeAILab / SpecForge, DeepSpec and speculators.

Each layout has a reader, from `config.json` and tensor names to a head, and a writer, from a head
to `config.json`; the tensors follow from the head's weight table. Everything that can be wrong
between a head and a target is refused here, before anything runs.

The layouts count tapped layers differently. DeepSpec's id l is the output of layer l, which is
residual stream l + 1; speculators' ids are residual streams; SafeAILab's are fixed (and where our
own heads differ, they say so in speculators' field).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.core.errors import CheckpointError, PairingError
from specjax.heads import pairing
from specjax.heads.base import Borrowed
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import (
    Eagle3Head,
    Layout,
    check_taps,
    default_taps,
    has_extra_norms,
)
from specjax.heads.eagle3.network import Eagle3Weights
from specjax.heads.released import (
    Shapes,
    check_sizes,
    read_geometry,
    read_layer_types,
    read_vocabulary,
    save_head,
    write_geometry,
)
from specjax.heads.vocabulary import check_maps
from specjax.io.hf import TensorReader, read_config, resolve
from specjax.layers.blocks.geometry import Gemma4Geometry, Geometry, PlainGeometry
from specjax.targets.base import TargetInfo

_TAPS = "eagle_aux_hidden_state_layer_ids"
_EMBED_SCALE = "specjax_embed_scale"  # our own word for what the layouts cannot say
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_ARCHITECTURES: Mapping[Layout, str] = {
    "safeai": "LlamaForCausalLMEagle3",
    "deepspec": "Qwen3Eagle3Model",
    "speculators": "Eagle3Speculator",
}


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """Tell the layout from a `config.json`; None if this is no EAGLE-3 head."""
    if "speculators_model_type" in config:
        return "speculators" if config["speculators_model_type"] == "eagle3" else None
    for name in config.get("architectures") or ():
        if name == _ARCHITECTURES["speculators"]:
            return "speculators"
        if name.endswith("Eagle3Model"):
            return "deepspec"
        if "Eagle3" in name:
            return "safeai"
    return None


def recognises(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an EAGLE-3 head."""
    return layout_of(config) is not None


def load(
    path: str | Path,
    info: TargetInfo,
    dtype: str = "float32",
    shardings: Any | None = None,
    borrowed: Borrowed | None = None,
) -> tuple[Eagle3Head, Eagle3Weights]:
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
    head: Eagle3Head, params: Eagle3Weights, path: str | Path, dtype: str | None = None
) -> None:
    """Write a head in its layout, whole or not at all.

    Args:
        head: the head.
        params: its weights.
        path: directory, made if needed.
        dtype: dtype on disk, None to keep the weights'.

    Raises:
        PairingError: the draft vocabulary's maps contradict each other.
    """
    if head.mapped:
        check_maps(params.d2t, params.t2d, str(path))
    save_head(head.specs(), params, write_config(head), path, dtype)


def read_head(
    config: Mapping[str, Any], shapes: Shapes, info: TargetInfo, where: str = "the head"
) -> Eagle3Head:
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
            f"{where}: architectures {config.get('architectures')} is not an EAGLE-3 head"
        )
    body = config.get("transformer_layer_config", {}) if layout == "speculators" else config
    if (layers := body.get("num_hidden_layers", 1)) != 1:
        raise CheckpointError(f"{where}: {layers} draft layers; an EAGLE-3 head has 1 here")
    if layout == "safeai" and config.get("norm_output") is False:
        raise CheckpointError(f"{where}: norm_output false (no final norm) is not supported")
    prefix = "midlayer." if layout == "safeai" else "layers.0."
    geometry = _read_geometry(body, shapes, prefix, where)
    gemma, hidden = isinstance(geometry, Gemma4Geometry), geometry.hidden
    target_hidden = config.get("target_hidden_size") or hidden
    check_sizes(target_hidden, body.get("vocab_size"), info, where)
    taps = _read_taps(layout, config, info, where)
    own_embedding = "embed_tokens.weight" in shapes
    if hidden != info.hidden and not own_embedding:
        raise PairingError(
            f"{where} is {hidden} wide and stores no embedding; the target's is {info.hidden}"
        )
    draft_vocab, mapped = read_vocabulary(config, shapes, info.vocab, where)
    own_output = "lm_head.weight" in shapes
    if not own_output:
        _check_borrowing(config, draft_vocab, own_embedding, hidden, info, where)
    flags = _NORMS if layout == "speculators" else _NORMS[:3]
    settings: dict[str, Any] = {name: bool(config.get(name)) for name in flags}
    settings |= {name: config[name] for name in ("ttt_length", "step_loss_decay") if name in config}
    return Eagle3Head(
        geometry=geometry,
        config=Eagle3Config(taps=taps, **settings),
        vocab=info.vocab,
        draft_vocab=draft_vocab,
        target_hidden=target_hidden,
        mapped=mapped,
        own_embedding=own_embedding,
        own_output=own_output,
        trained_output=own_output and layout == "safeai",
        layout=layout,
        target_layers=info.num_layers,
        max_context=body.get("max_position_embeddings") or 0,
        # Heads with Gemma's layers embed as Gemma does; others say so themselves, or do not.
        embed_scale=float(config.get(_EMBED_SCALE) or (hidden**0.5 if gemma else 1.0)),
        softcap=body.get("final_logit_softcapping"),
    )


def _read_geometry(body: Mapping[str, Any], shapes: Shapes, prefix: str, where: str) -> Geometry:
    """Read the layer, whose attention reads embedding and state side by side."""
    if "sliding" in read_layer_types(body, 1, where):
        raise CheckpointError(f"{where}: sliding layers are not part of an EAGLE-3 head")
    geometry = read_geometry(body, shapes, prefix, where)
    inputs = 2 * geometry.hidden
    if isinstance(geometry, PlainGeometry):
        return PlainGeometry(dataclasses.replace(geometry.block, inputs=inputs))
    attention = dataclasses.replace(geometry.layer.attention, inputs=inputs)
    return Gemma4Geometry(dataclasses.replace(geometry.layer, attention=attention))


def _read_taps(
    layout: Layout, config: Mapping[str, Any], info: TargetInfo, where: str
) -> tuple[int, ...]:
    """Return the tapped residual streams, in transformers' numbering."""
    if layout == "deepspec":
        ids = config.get("target_layer_ids")
        if not ids:
            raise CheckpointError(f"{where}: config.json lacks target_layer_ids")
        # The output of the last layer is normed in some caches and raw in others.
        if any(not 0 <= i < info.num_layers - 1 for i in ids):
            raise PairingError(
                f"{where} taps layers {list(ids)} of a target with {info.num_layers}; "
                f"target_layer_ids must lie in 0..{info.num_layers - 2}"
            )
        return tuple(i + 1 for i in ids)
    taps = tuple(config.get(_TAPS) or default_taps(info.num_layers))
    check_taps(taps, info)
    return taps


def _check_borrowing(
    config: Mapping[str, Any],
    draft_vocab: int,
    own_embedding: bool,
    hidden: int,
    info: TargetInfo,
    where: str,
) -> None:
    """Refuse to stand the target's output layer in for one that it does not equal."""
    if draft_vocab != info.vocab or hidden != info.hidden:
        raise PairingError(
            f"{where} stores no lm_head.weight, and the target's [{info.vocab}, {info.hidden}] "
            f"is not its [{draft_vocab}, {hidden}]"
        )
    if config.get("tie_word_embeddings") and own_embedding:
        raise CheckpointError(f"{where} ties its output to its own embedding: not supported")


def write_config(head: Eagle3Head) -> dict[str, Any]:
    """Return the `config.json` of a head.

    The output layer is never tied: a short one cannot be, and a stored one is the head's own.

    Raises:
        PairingError: the layout has no words for the head's norms.
    """
    if head.layout != "speculators" and has_extra_norms(head.config):
        raise PairingError(f"the {head.layout} layout cannot express {', '.join(_NORMS)}")
    body = write_geometry(head.geometry) | {
        "vocab_size": head.vocab,
        "tie_word_embeddings": False,
        "num_hidden_layers": 1,
    }
    if head.layout == "safeai":  # the older spelling
        rope = body.pop("rope_parameters")
        body["rope_theta"] = rope.pop("rope_theta")
        body["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if head.max_context:
        body["max_position_embeddings"] = head.max_context
    if head.softcap is not None:
        body["final_logit_softcapping"] = head.softcap
    gemma = isinstance(head.geometry, Gemma4Geometry)
    if gemma:
        body["layer_types"] = ["full_attention"]
    usual = head.geometry.hidden**0.5 if gemma else 1.0
    said = {} if head.embed_scale == usual else {_EMBED_SCALE: head.embed_scale}
    architecture = "Gemma4Eagle3Model" if gemma else _ARCHITECTURES[head.layout]
    return {"architectures": [architecture], **_write_own(head, body), **said}


def _write_own(head: Eagle3Head, body: dict[str, Any]) -> dict[str, Any]:
    """Return the layout's own keys around those of the layer."""
    if head.layout == "deepspec":
        return {
            **body,
            "target_layer_ids": [tap - 1 for tap in head.taps],
            "num_target_layers": head.target_layers,
            "draft_num_hidden_layers": 1,
            "ttt_length": head.config.ttt_length,
            "step_loss_decay": head.config.step_loss_decay,
        }
    if head.layout == "safeai":
        usual = head.taps == default_taps(head.target_layers)
        return {
            **body,
            "draft_vocab_size": head.draft_vocab,
            **({} if head.target_hidden == head.geometry.hidden else _width(head)),
            **({} if usual else {_TAPS: list(head.taps)}),
        }
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": max(head.config.ttt_length, 1),
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": body,
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
        "tie_word_embeddings": False,
        "embed_requires_grad": False,
        _TAPS: list(head.taps),
        **{name: getattr(head.config, name) for name in _NORMS},
    }


def _width(head: Eagle3Head) -> dict[str, int]:
    return {"target_hidden_size": head.target_hidden}
