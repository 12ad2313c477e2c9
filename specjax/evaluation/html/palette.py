"""Colours: one per head in every figure and on every page, for light and for dark."""

from __future__ import annotations

# name -> (light, dark). The light ones are what figures are drawn in; a page replaces each by its
# variable, so no two may be equal.
COLOURS = {
    "ink": ("#1b1f24", "#e8eaed"),
    "muted": ("#59616b", "#a6adb7"),
    "line": ("#dfe3e8", "#363c45"),
    "panel": ("#ffffff", "#1b1f25"),
    "none": ("#8a8f98", "#8f96a4"),
    "mtp": ("#0b8a6a", "#3fd1a6"),
    "gemma4_mtp": ("#a8328f", "#ef8fd8"),
    "eagle3": ("#0f6cbd", "#62b3ff"),
    "dflash": ("#a97400", "#f2c14e"),
    "dspark": ("#cc4a16", "#ff9a6b"),
    "ngram": ("#5b6b8c", "#a9b9dc"),
    "small_model": ("#7a5230", "#d2a679"),
    "propose": ("#4c5fd5", "#98a5ff"),
    "observe": ("#8fa0f0", "#6473d8"),
    "verify": ("#e0912f", "#f0b060"),
    "commit": ("#a9b0b9", "#7d8590"),
}
TIMES = "\u00d7"
_NAMES = {
    "none": "Baseline",
    "mtp": "Native MTP",
    "gemma4_mtp": "Gemma 4 MTP",
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "ngram": "Prompt lookup",
    "small_model": "Small model",
}


def colour(head: str) -> str:
    """Return the light colour of a head, by the name that records call it."""
    return COLOURS[head if head in COLOURS else "none"][0]


def title(head: str) -> str:
    """Return what readers call a head."""
    return _NAMES.get(head, head)


def variables(dark: bool) -> str:
    """Return the colours as declarations of CSS variables."""
    return "".join(f"--{name}:{pair[dark]};" for name, pair in COLOURS.items())


def themed(svg: str) -> str:
    """Return a figure whose colours are those variables."""
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name})")
    return svg
