"""How the names in a checkpoint's files become the names of our weight tables.

Families name their weights as a text-only checkpoint with one tensor per expert does. Releases put
the text model inside a multimodal wrapper, and store the experts of a layer in one tensor. Both
are matters of names and slices: a `View` says where a tensor of the table lies in the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# (published prefix, ours); the first that matches is replaced.
_WRAPPERS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor of the weight table as a part of a published one.

    Attributes:
        name: the published tensor.
        index: which of its leading entries: numbers drop the axis, slices keep it.
    """

    name: str
    index: tuple[int | slice, ...] = ()

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of shape `whole`."""
        kept = [
            len(range(*at.indices(size)))
            for size, at in zip(whole, self.index, strict=False)
            if isinstance(at, slice)
        ]
        return (*kept, *whole[len(self.index) :])

    def part(
        self, whole: tuple[int, ...], index: tuple[slice, ...] | None
    ) -> tuple[int | slice, ...]:
        """Return the published tensor's index of a part of this one."""
        wanted = list(index or ())
        out: list[int | slice] = []
        for size, at in zip(whole, self.index, strict=False):
            if isinstance(at, int):
                out.append(at)
                continue
            inside = range(*at.indices(size))
            rows = inside[wanted.pop(0)] if wanted else inside
            out.append(slice(rows.start, rows.stop))
        return (*out, *wanted)


def text_name(published: str) -> str:
    """Return the name that a text-only checkpoint would give a tensor."""
    for wrapper, ours in _WRAPPERS:
        if published.startswith(wrapper):
            return ours + published.removeprefix(wrapper)
    return published


def views(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, View]:
    """Map the names of a text-only checkpoint with one tensor per expert to what files hold.

    Stacked experts are `gate_up_proj [E, 2 I, H]`, the first I rows gate, and `down_proj
    [E, H, I]` (TARGETS 2: the same family occurs in both layouts).

    Args:
        shapes: published name to shape.
    """
    found: dict[str, View] = {}
    for published, shape in shapes.items():
        name = text_name(published)
        if name.endswith(_GATE_UP) and len(shape) == 3:
            width = shape[1] // 2
            base = name.removesuffix("gate_up_proj")
            for e in range(shape[0]):
                found[f"{base}{e}.gate_proj.weight"] = View(published, (e, slice(0, width)))
                found[f"{base}{e}.up_proj.weight"] = View(published, (e, slice(width, 2 * width)))
        elif name.endswith(_DOWN) and len(shape) == 3:
            base = name.removesuffix("down_proj")
            for e in range(shape[0]):
                found[f"{base}{e}.down_proj.weight"] = View(published, (e,))
        else:
            found[name] = View(published)
    return found
