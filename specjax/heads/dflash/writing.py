"""The `config.json` of DFlash and DSpark heads, in the three published forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specjax.heads.dflash.fit import choose_layout
from specjax.heads.released import write_geometry
from specjax.layers.blocks.geometry import Gemma4Geometry

if TYPE_CHECKING:
    from specjax.heads.dflash.head import DFlashHead

TEMPERATURES = "specjax_confidence_temperatures"
"""Our own word for what no layout can say; other readers skip it."""
_WORDS = {"full": "full_attention", "sliding": "sliding_attention"}


def write_config(head: DFlashHead) -> dict[str, Any]:
    """Return the `config.json` of a head.

    Raises:
        ConfigError: the layout has no words for what the head is.
    """
    choose_layout(head.config, head.draft_vocab if head.mapped else None)
    own = {"zlab": _zlab, "deepspec": _deepspec, "speculators": _speculators}
    written = own[head.config.layout](head, _layer_fields(head))
    if head.temperatures:
        written[TEMPERATURES] = list(head.temperatures)
    return written


def _layer_fields(head: DFlashHead) -> dict[str, Any]:
    """Return the fields of the layers, windows among them."""
    types = head.config.layer_types
    sliding = "sliding" in types
    fields = {
        **write_geometry(head.geometry),
        "num_hidden_layers": head.config.layers,
        "layer_types": [_WORDS[kind] for kind in types],
        "sliding_window": head.config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "vocab_size": head.vocab,
        "tie_word_embeddings": False,
    }
    if head.max_context:
        fields["max_position_embeddings"] = head.max_context
    return fields


def _target_layer_ids(head: DFlashHead) -> list[int]:
    return [tap - 1 for tap in head.taps]


def _zlab(head: DFlashHead, layers: dict[str, Any]) -> dict[str, Any]:
    """Write for both revisions: they look for block size and rope in different places."""
    config, rope = head.config, dict(layers["rope_parameters"])
    theta = rope.pop("rope_theta")
    own: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": _target_layer_ids(head),
    }
    if head.embed_scale != 1.0:
        own["input_embedding_scale"] = head.embed_scale
    written = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **layers,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "block_size": config.block_size,
        "num_target_layers": head.target_layers,
        "dflash_config": own,
    }
    if config.causal != "sliding":  # what holds for the sliding layers alone is said by silence
        written["is_causal"] = config.causal == "all"
    return written | _cap(head)


def _cap(head: DFlashHead) -> dict[str, Any]:
    return {} if head.softcap is None else {"final_logit_softcapping": head.softcap}


def _deepspec(head: DFlashHead, layers: dict[str, Any]) -> dict[str, Any]:
    config = head.config
    gemma = isinstance(head.geometry, Gemma4Geometry)
    written = {
        "architectures": ["Gemma4DSparkModel" if gemma else "Qwen3DSparkModel"],
        **layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": _target_layer_ids(head),
        "num_target_layers": head.target_layers,
        "num_anchors": config.num_anchors,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence,
    }
    if config.markov_rank:
        written["markov_head_type"] = config.markov_head
    if config.confidence:
        written["confidence_head_with_markov"] = config.confidence_with_markov
    return written | _cap(head)


def _speculators(head: DFlashHead, layers: dict[str, Any]) -> dict[str, Any]:
    config = head.config
    kind = {"dflash": "DFlash", "dspark": "DSpark"}[head.name]
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": head.max_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    written = {
        "architectures": [f"{kind}Speculator"],
        "auto_map": {"": f"config.{kind}SpeculatorConfig"},
        "speculators_model_type": head.name,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": head.name,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
        "tie_word_embeddings": False,
        "aux_hidden_state_layer_ids": list(head.taps),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.causal == "none",
    }
    if head.name == "dspark":
        written |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    return written | _cap(head)
