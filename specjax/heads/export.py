"""A trained head on its way out: layout, the target it is for, and rows that need not go along."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.core.errors import PairingError
from specjax.heads import pairing
from specjax.heads.base import Borrowed
from specjax.heads.released import save_head
from specjax.io.quant import dequantise_tree

PyTree = Any

# What each kind of head can be written as; "original" is the form of the algorithm's authors.
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "eagle3": ("speculators", "original", "safeai", "deepspec"),
    "dflash": ("speculators", "original", "zlab", "deepspec"),
    "dspark": ("speculators", "original", "deepspec"),
    "mtp": ("speculators",),
    "gemma4_mtp": ("original",),
}

OWN = "own"
"""The layout that the head has: also where no other package could read it."""


@dataclasses.dataclass(frozen=True)
class Verifier:
    """The target, as exports name it.

    Attributes:
        name: hub id or path; what other packages load the target by.
        architectures: of its `config.json`.
    """

    name: str
    architectures: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        layout: the layout; of "original" the one it stands for.
        head: the head in that layout.
        params: its weights, as in the file, with the rows that were left out.
        left_out: "embedding", "output": tables that the file lacks though the head has them.
        from_target: tables that a reader takes from the target, those left out among them.
    """

    layout: str
    head: Any
    params: PyTree
    left_out: tuple[str, ...]
    from_target: tuple[str, ...]


def export(
    head: Any,
    params: PyTree,
    borrowed: Borrowed,
    path: str | Path,
    *,
    layout: str,
    verifier: Verifier,
    dtype: str | None = None,
    bodies_only: bool = False,
) -> Exported:
    """Write a head in a published layout, whole or not at all.

    Args:
        head: the head.
        params: its weights.
        borrowed: the embedding and output layer of its target.
        path: directory, made if needed.
        layout: see `LAYOUTS`; `OWN` for the one that the head has.
        verifier: the target.
        dtype: dtype on disk, None to keep the weights'.
        bodies_only: leave out tables that are the target's rows bit for bit.

    Raises:
        PairingError: the layout cannot express the head, or these are another target's tables.
        CheckpointError: the files cannot be written.
    """
    head, params, chosen = convert(head, params, layout, borrowed)
    config = _layouts(head).write_config(head)
    if isinstance(config.get("speculators_config"), dict):
        named = {"name_or_path": verifier.name, "architectures": list(verifier.architectures)}
        config["speculators_config"] = {**config["speculators_config"], "verifier": named}
    left_out: tuple[str, ...] = ()
    if bodies_only and hasattr(params, "d2t"):
        left_out = pairing.lent_rows(params, borrowed)
    specs, stored = _without(head.specs(), left_out), _without(params, left_out)
    lent = _from_target(head, stored)
    if lent:
        config |= pairing.fields(lent, borrowed, verifier.name)
    save_head(specs, stored, config, path, dtype)
    return Exported(chosen, head, params, left_out, lent)


def convert(head: Any, params: PyTree, layout: str, borrowed: Borrowed) -> tuple[Any, PyTree, str]:
    """Return (head, weights, layout) for a layout of `LAYOUTS`, or `OWN`.

    Raises:
        PairingError: there is no such layout for the head, or it cannot express it.
    """
    if layout == OWN:
        return head, params, OWN
    if head.name not in LAYOUTS:
        raise PairingError(f"{head.name} heads have no published layout")
    if layout not in LAYOUTS[head.name]:
        raise PairingError(
            f"{head.name} heads cannot be written in {layout!r} layout; have "
            + ", ".join(LAYOUTS[head.name])
        )
    if head.name == "mtp":
        if reason := _mtp_lacks(head):
            raise PairingError(f"speculators' layout cannot express these MTP modules: no {reason}")
        return head, dequantise_tree(params, "float32"), layout
    if head.name == "gemma4_mtp":
        return head, params, "gemma4_assistant"
    kind = "eagle3" if head.name == "eagle3" else "dflash"
    module = importlib.import_module(f"specjax.heads.{kind}.convert")
    head, params = module.in_layout(head, params, layout, borrowed)
    return head, params, head.layout if kind == "eagle3" else head.config.layout


def _mtp_lacks(head: Any) -> str:
    """Name what of MTP modules speculators' layout has no words for, "" if nothing."""
    if head.config.carried != "normed":
        return "states carried raw"
    if head.config.zero_first:
        return "zeroed first embedding"
    if head.embed_scale != 1.0:
        return "scaled embeddings (the target scales its own)"
    return "" if head.softcap is None else "capped logits (the target caps its own)"


def _without(tree: PyTree, names: tuple[str, ...]) -> PyTree:
    """Return a tree of weights or specs without some of its tables."""
    nothing: dict[str, Any] = dict.fromkeys(names)
    return dataclasses.replace(tree, **nothing) if names else tree


def _layouts(head: Any) -> Any:
    kind = "dflash" if head.name == "dspark" else head.name
    return importlib.import_module(f"specjax.heads.{kind}.layouts")


def _from_target(head: Any, stored: PyTree) -> tuple[str, ...]:
    """Return the tables that a reader of the file takes from the target."""
    if head.name == "mtp":
        return pairing.ROWS
    if head.name == "gemma4_mtp":
        return pairing.ROWS[:1]
    return tuple(name for name in pairing.ROWS if getattr(stored, name) is None)
