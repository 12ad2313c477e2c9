"""An EAGLE-3 head in another of its published layouts, its weights unchanged.

What a layout has no words for is refused: another reader would draft something else.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax.numpy as jnp

from specjax.core.errors import PairingError
from specjax.heads.base import Borrowed
from specjax.heads.eagle3.head import Eagle3Head, Layout, has_extra_norms
from specjax.heads.eagle3.network import Eagle3Weights
from specjax.layers.blocks.geometry import Gemma4Geometry, PlainGeometry


def lacks(head: Eagle3Head, layout: Layout) -> str:
    """Name what of a head a layout has no words for, "" if nothing."""
    return {"safeai": _safeai_lacks, "deepspec": _deepspec_lacks, "speculators": _shared_lacks}[
        layout
    ](head)


def _shared_lacks(head: Eagle3Head) -> str:
    """Name what neither SafeAILab's nor speculators' layout can say."""
    if isinstance(head.geometry, Gemma4Geometry):
        return "Gemma 4 layers"
    if head.embed_scale != 1.0:
        return "scaled embeddings (the target scales its own)"
    return "" if head.softcap is None else "capped logits (the target caps its own)"


def _safeai_lacks(head: Eagle3Head) -> str:
    if reason := _shared_lacks(head):
        return reason
    if has_extra_norms(head.config):
        return "norms beside EAGLE-3's own"
    return "norms of queries and keys" if _qk_norm(head) else ""


def _deepspec_lacks(head: Eagle3Head) -> str:
    if head.mapped:
        return "draft vocabulary"
    if has_extra_norms(head.config):
        return "norms beside EAGLE-3's own"
    if wrong := [tap for tap in head.taps if not 1 <= tap < head.target_layers]:
        return f"residual stream {wrong[0]} among its taps"
    if isinstance(head.geometry, Gemma4Geometry):
        return ""
    if head.embed_scale != 1.0:
        return "scaled embeddings with plain layers"
    return "" if _qk_norm(head) else "layers without norms of queries and keys"


def _qk_norm(head: Eagle3Head) -> bool:
    return isinstance(head.geometry, PlainGeometry) and head.geometry.block.qk_norm


def original(head: Eagle3Head) -> Layout:
    """Return the layout of EAGLE-3's authors, or DeepSpec's where only that can express the head.

    Raises:
        PairingError: neither can.
    """
    own: tuple[Layout, ...] = ("safeai", "deepspec")
    for layout in own:
        if not lacks(head, layout):
            return layout
    said = "; ".join(f"{layout} has no {lacks(head, layout)}" for layout in own)
    raise PairingError(f"no original layout can express this EAGLE-3 head: {said}")


def in_layout(
    head: Eagle3Head, params: Eagle3Weights, layout: str, borrowed: Borrowed
) -> tuple[Eagle3Head, Eagle3Weights]:
    """Return a head and its weights for another layout.

    Args:
        head: the head.
        params: its weights.
        layout: "safeai", "deepspec", "speculators", or "original".
        borrowed: the target's tables, which fill in what the head borrows and the layout stores.

    Raises:
        PairingError: the layout does not exist, or cannot express the head.
    """
    if layout != "original" and layout not in get_args(Layout):
        raise PairingError(
            f"an EAGLE-3 head has no layout {layout!r}; have original, "
            + ", ".join(get_args(Layout))
        )
    chosen: Layout = original(head) if layout == "original" else layout  # type: ignore[assignment]
    if reason := lacks(head, chosen):
        raise PairingError(f"the {chosen} layout cannot express this EAGLE-3 head: no {reason}")
    dtype = params.fc.dtype
    if params.output is None:
        params = dataclasses.replace(params, output=jnp.asarray(borrowed.output, dtype))
    if params.embedding is None and chosen != "safeai":  # its files have none
        params = dataclasses.replace(params, embedding=jnp.asarray(borrowed.embedding, dtype))
    converted = dataclasses.replace(
        head,
        layout=chosen,
        own_embedding=params.embedding is not None,
        own_output=True,
        trained_output=head.trained_output and chosen == "safeai",
    )
    return converted, params
