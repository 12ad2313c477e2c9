"""A DFlash or DSpark head in another of the published layouts, its weights unchanged.

What a layout has no words for, or means otherwise, is refused.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax.numpy as jnp

from specjax.core.errors import ConfigError, PairingError
from specjax.heads import pairing
from specjax.heads.base import Borrowed
from specjax.heads.dflash.config import Layout
from specjax.heads.dflash.fit import deepspec_lacks, speculators_lacks, zlab_lacks
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.dflash.network import DFlashWeights


def lacks(head: DFlashHead, layout: Layout) -> str:
    """Name what of a head a layout has no words for, or means otherwise; "" if nothing."""
    drafts = head.draft_vocab if head.mapped else None
    config = head.config
    reasons = {
        "zlab": lambda: zlab_lacks(config, drafts),
        "deepspec": lambda: deepspec_lacks(config, drafts),
        "speculators": lambda: speculators_lacks(config),
    }
    if reason := reasons[layout]():
        return reason
    from_anchor = layout == "speculators"
    if "sliding" in config.layer_types and head.window_from_anchor != from_anchor:
        return "windows counted as this head's are"
    lowest = 0 if from_anchor else 1 if layout == "zlab" else 0
    most = head.target_layers - (not from_anchor)
    if wrong := [tap for tap in head.taps if not lowest <= tap <= most]:
        return f"residual stream {wrong[0]} among its taps"
    if layout == "speculators" and head.softcap is not None:
        return "capped logits (the target caps its own)"
    plain = config.body == "plain"
    if head.embed_scale != 1.0 and layout != "zlab" and plain:
        return "scaled embeddings (the target scales its own)"
    return ""


def original(head: DFlashHead) -> Layout:
    """Return the layout of the algorithm's authors that can express a head.

    z-lab's for DFlash and DeepSpec's for DSpark; DeepSpec's DFlash predicts one token further.

    Raises:
        PairingError: none can.
    """
    own: tuple[Layout, ...] = ("deepspec",) if head.name == "dspark" else ("zlab", "deepspec")
    for layout in own:
        if not lacks(head, layout):
            return layout
    said = "; ".join(f"{layout} has no {lacks(head, layout)}" for layout in own)
    raise PairingError(f"no original layout can express this {head.name} head: {said}")


def in_layout(
    head: DFlashHead, params: DFlashWeights, layout: str, borrowed: Borrowed
) -> tuple[DFlashHead, DFlashWeights]:
    """Return a head and its weights for another layout.

    Args:
        head: the head.
        params: its weights.
        layout: "zlab", "deepspec", "speculators", or "original".
        borrowed: the target's tables: what the head borrows and the layout stores, and what the
            layout leaves to the target and so must be the target's.

    Raises:
        PairingError: the layout does not exist, or cannot express the head.
    """
    if layout != "original" and layout not in get_args(Layout):
        raise PairingError(
            f"a {head.name} head has no layout {layout!r}; have original, "
            + ", ".join(get_args(Layout))
        )
    chosen: Layout = original(head) if layout == "original" else layout  # type: ignore[assignment]
    if reason := lacks(head, chosen):
        raise PairingError(f"the {chosen} layout cannot express this {head.name} head: no {reason}")
    try:
        config = dataclasses.replace(head.config, layout=chosen)
    except ConfigError as error:
        raise PairingError(str(error)) from None
    whole = chosen != "zlab"
    if whole:
        dtype = params.fc.dtype
        if params.embedding is None:
            params = dataclasses.replace(params, embedding=jnp.asarray(borrowed.embedding, dtype))
        if params.output is None:
            params = dataclasses.replace(params, output=jnp.asarray(borrowed.output, dtype))
    else:
        own = {name for name in pairing.ROWS if getattr(params, name) is not None}
        if other := sorted(own - set(pairing.lent_rows(params, borrowed))):
            raise PairingError(
                f"the zlab layout stores no {other[0]} rows, and this head's are not the target's"
            )
        params = dataclasses.replace(params, embedding=None, output=None)
    converted = dataclasses.replace(head, config=config, own_embedding=whole, own_output=whole)
    return converted, params
