"""Released MTP modules: inside a target's own checkpoint, or in a file of their own.

Inside a target: Qwen3.5's `mtp.*`, where projection and norms are stored once for all modules, and
DeepSeek's layers behind the last, which come with copies of embedding and output layer that are not
read. A file of its own has speculators' form, whatever the target's family; that is also what is
written. Everything that can be wrong between modules and a target is refused here, before anything
runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.core.errors import CheckpointError, ConfigError, PairingError
from specjax.heads import pairing
from specjax.heads.base import Borrowed
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.fields import read_layer, write_layer
from specjax.heads.mtp.head import MtpHead
from specjax.heads.mtp.network import SPECULATORS, MtpWeights, Names, weight_specs
from specjax.heads.released import Shapes, check_sizes
from specjax.io.hf import TensorReader, load_params, read_config, resolve, save_checkpoint
from specjax.io.quant import dequantise_tree, quantised_specs
from specjax.layers.blocks.deepseek import DeepseekLayer
from specjax.layers.blocks.qwen3_5 import GatedAttentionLayer
from specjax.targets.base import TargetInfo
from specjax.targets.loading import from_config, text_config

_ARCHITECTURE = "MTPDraftModel"
# A target's words for the modules that it has, or says that it has.
_DECLARED = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")
_OWN = "specjax_mtp"  # settings that speculators' form has no words for
_SETTINGS = ("reuse", "carried", "zero_first")

_QWEN = Names(
    fc="mtp.fc.weight",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    norm="mtp.norm.weight",
    layer="mtp.layers.{i}.",
)
_DEEPSEEK = Names(
    fc="model.layers.{i}.eh_proj.weight",
    embedding_norm="model.layers.{i}.enorm.weight",
    hidden_norm="model.layers.{i}.hnorm.weight",
    norm="model.layers.{i}.shared_head.norm.weight",
    layer="model.layers.{i}.",
)
_COPIES = ("*.embed_tokens.weight", "*.shared_head.head.weight", "*.rotary_emb.inv_freq")


def in_a_file(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of modules in a file of their own."""
    if "speculators_model_type" in config:
        return config["speculators_model_type"] == "mtp"
    return _ARCHITECTURE in (config.get("architectures") or ())


def recognises(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of MTP modules, or of a target that speaks of its own.

    Also of one that has none in the end: `read_head` says so.
    """
    if in_a_file(config):
        return True
    if "speculators_model_type" in config:
        return False
    text = text_config(config)
    return any(text.get(name) is not None for name in _DECLARED)


def load(
    path: str | Path,
    info: TargetInfo,
    dtype: str = "float32",
    shardings: Any | None = None,
    borrowed: Borrowed | None = None,
) -> tuple[MtpHead, MtpWeights]:
    """Load modules for a target, out of its own checkpoint or a file of theirs.

    Weights that are stored quantised stay so.

    Args:
        path: directory or hub id.
        info: facts of the target they shall serve.
        dtype: dtype in memory.
        shardings: as in `io.hf.load_params`.
        borrowed: the target's embedding and output layer, to check that they are the right ones.

    Raises:
        PairingError: modules and target do not belong together, or there are no modules.
        CheckpointError: a malformed checkpoint; tensors that do not fit are all named.
    """
    root = resolve(path)
    config, reader = read_config(root), TensorReader(root)
    pairing.check(config, borrowed, str(root))
    head = read_head(config, reader.shapes, info, str(root))
    names, first = _names(config, head, info)
    stems = tuple({names.layer.format(i=first + i) for i in range(head.modules)})
    if names is _QWEN:
        stems = ("mtp.",)
    # Of a whole target's tensors only the modules' are looked at.
    reader.shapes = {name: s for name, s in reader.shapes.items() if name.startswith(stems)}
    if not reader.shapes:
        raise PairingError(
            f"{root} declares {head.modules} MTP modules but stores no weights of them"
            f" ({stems[0]}*)"
        )
    specs, parts = quantised_specs(weight_specs(head, names, first), reader, config)
    return head, load_params(specs, reader, dtype, shardings, ignore=(*_COPIES, *parts))


def _names(config: Mapping[str, Any], head: MtpHead, info: TargetInfo) -> tuple[Names, int]:
    """Return (what tensors are called, the number of the first module)."""
    if in_a_file(config):
        return SPECULATORS, 0
    return (_DEEPSEEK, info.num_layers) if isinstance(head.layer, DeepseekLayer) else (_QWEN, 0)


def save(head: MtpHead, params: MtpWeights, path: str | Path, dtype: str | None = None) -> None:
    """Write modules in a file of their own, whole or not at all; packed weights are unpacked.

    Args:
        head: the head.
        params: its weights.
        path: directory, made if needed.
        dtype: dtype on disk, None to keep the weights'.

    Raises:
        PairingError: speculators' form has no fields for such a layer.
    """
    config = write_config(head)
    params = dequantise_tree(params, dtype or "float32")
    save_checkpoint(head.specs(), params, config, path, dtype)


def read_head(
    config: Mapping[str, Any], shapes: Shapes, info: TargetInfo, where: str = "the head"
) -> MtpHead:
    """Build a head from a configuration and the shapes of its tensors.

    Args:
        config: `config.json` of the modules, or of a target that holds them.
        shapes: shape of each stored tensor.
        info: facts of the target they shall serve.
        where: names the head in messages.

    Raises:
        PairingError: the modules cannot serve this target, or there are none.
        CheckpointError: the configuration asks for what no reader here understands.
    """
    read = _read_file if in_a_file(config) else _read_target
    return read(config, shapes, info, where)


def _read_target(
    config: Mapping[str, Any], shapes: Shapes, info: TargetInfo, where: str
) -> MtpHead:
    """Build the modules that a target's checkpoint holds."""
    del shapes  # all follows from the target's configuration
    text = text_config(config)
    if text.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(f"{where}: mtp_use_dedicated_embeddings is not supported")
    own = from_config(config).info
    if not own.draft_modules:
        said = next((f"{name} {text[name]}" for name in _DECLARED if text.get(name)), "")
        reason = f"declares {said}, but no weights of them are published" if said else "has none"
        raise PairingError(f"{where}: its checkpoint holds no MTP modules: it {reason}")
    for what in ("family", "hidden", "vocab", "num_layers", "draft_layer"):
        theirs, ours = getattr(own, what), getattr(info, what)
        if theirs != ours:
            raise PairingError(
                f"{where}: MTP modules of a target with {what} {theirs}; this one has {ours}"
            )
    return MtpHead.for_target(info, MtpConfig(modules=own.draft_modules))


def _read_file(config: Mapping[str, Any], shapes: Shapes, info: TargetInfo, where: str) -> MtpHead:
    """Build modules that have a file of their own."""
    body = config.get("transformer_layer_config") or {}
    for width in (body.get("hidden_size"), config.get("target_hidden_size") or info.hidden):
        check_sizes(width, body.get("vocab_size"), info, where)
    modules = config.get("num_nextn_predict_layers", 1)
    if not isinstance(modules, int) or modules < 1:
        raise CheckpointError(
            f"{where}: num_nextn_predict_layers is {modules}; it must be 1 or more"
        )
    given = config.get(_OWN) or {}
    settings = {name: given[name] for name in _SETTINGS if name in given}
    try:
        read = MtpConfig(modules=modules, **settings)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    head = MtpHead.for_target(info, read, read_layer(body, shapes, info, where))
    return dataclasses.replace(
        head,
        eps=float(body.get("rms_norm_eps", head.eps)),
        max_context=body.get("max_position_embeddings") or 0,
    )


def write_config(head: MtpHead) -> dict[str, Any]:
    """Return the `config.json` of modules in a file of their own.

    Raises:
        PairingError: there are no fields for such a layer.
    """
    body = {
        **write_layer(head.layer, head.family),
        "vocab_size": head.vocab,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    if isinstance(head.layer, GatedAttentionLayer):  # of the target's kinds, this one
        body["layer_types"] = ["full_attention"]
    if head.max_context:
        body["max_position_embeddings"] = head.max_context
    usual = MtpConfig()
    said = {
        name: getattr(head.config, name)
        for name in _SETTINGS
        if getattr(head.config, name) != getattr(usual, name)
    }
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": head.max_tokens or max(head.config.steps, head.modules),
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [_ARCHITECTURE],
        "speculators_model_type": "mtp",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": body,
        "num_nextn_predict_layers": head.modules,
        "target_hidden_size": head.hidden,
        "tie_word_embeddings": False,
        **({_OWN: said} if said else {}),
    }
