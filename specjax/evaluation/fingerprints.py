"""Digests of what an evaluation reads: what a finished cell is known by when a sweep goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.data.prompts import Prompt
from specjax.io.hf import resolve

_BLOCK = 1 << 16
_BLOCKS = 64
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")


def of_json(value: Any) -> str:
    """Return the digest of a JSON value, 16 hex digits."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_checkpoint(source: str) -> str:
    """Return a digest of a checkpoint directory (or hub id): settings, tokenizer and weights.

    Of weight files larger than a few MB it takes the size and blocks spread evenly over the file:
    whole ones would cost minutes, and no two trainings agree in all of those blocks.

    Raises:
        CheckpointError: no such checkpoint.
    """
    root = resolve(source)
    total = hashlib.sha256()
    files = {file for pattern in _SMALL for file in root.glob(pattern)}
    for file in sorted(files):
        total.update(file.name.encode() + file.read_bytes())
    for file in sorted(root.glob("*.safetensors")):
        size = file.stat().st_size
        total.update(f"{file.name} {size} ".encode())
        with file.open("rb") as handle:
            if size <= _BLOCK * _BLOCKS:
                total.update(handle.read())
                continue
            for i in range(_BLOCKS):
                handle.seek((size - _BLOCK) * i // (_BLOCKS - 1))
                total.update(handle.read(_BLOCK))
    return total.hexdigest()[:16]


def of_head(source: str) -> str:
    """Return the digest of what `Eval.head` names; a word without files stands for itself.

    Raises:
        CheckpointError: no such checkpoint.
    """
    if source in ("", "none", "ngram", "mtp"):
        return source
    word, colon, rest = source.partition(":")
    return of_checkpoint(rest if word == "small_model" and colon else source)


def of_prompts(prompts: Sequence[Prompt]) -> str:
    """Return the digest of what is asked and of the right answers."""
    return of_json([[p.system, *p.turns, p.answer] for p in prompts])


def of_file(name: str) -> str:
    """Return the digest of a file's content, or the name itself where there is no such file."""
    path = Path(name).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else name
