"""The demonstration target, its draft heads and prompts, which come with the package.

`README.md` beside this file is their model card: what they are, how `scripts/train_demo.py` made
them, and what was measured.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

TARGET = "gemma4-demo"
"""Folder of the target, and what records call it."""
HEADS = ("mtp", "gemma4_mtp", "eagle3", "dflash", "dspark")
"""Folders under `heads`."""


def folder() -> Path:
    """Return the folder that holds `TARGET`, `heads` and `prompts.jsonl`."""
    return Path(str(importlib.resources.files(__name__)))
