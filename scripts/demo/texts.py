"""Answers of a larger model, brought into the one form that the demonstration target learns."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specjax.core.errors import DataError

HELD_OUT = 160
"""Prompts at the end of the file that no training run sees; the last of them ship."""
SHIPPED = 16

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_LAST_NUMBER = re.compile(rf".*?({_NUMBER})(?!.*\d)", re.DOTALL)
_CLOSING = re.compile(
    r"(?:(?:So|Therefore|Thus|Hence),? )?the (?:final )?answer is:? *"
    rf"\$?{_NUMBER}[^\d\n]{{0,20}}",
    re.IGNORECASE,
)
_BOXED = re.compile(r"\\boxed\{[^{}]+\}\.?$")
_REPEATS = 3  # of one sentence, from which on an answer goes round in circles


def in_form(text: str) -> bool:
    """Whether a text ends as the target is trained to end: with a filled box."""
    return bool(_BOXED.search(text.strip()))


def trained_form(answer: str) -> str | None:
    """Put the number that an answer ends with into a box in a closing line of its own.

    Args:
        answer: as the larger model gave it; it hardly ever fills the box it was asked for.

    Returns:
        The answer in the trained form, or None where its last line has no number or the text
        repeats itself.
    """
    body, _, last = answer.strip().rpartition("\n")
    found = _LAST_NUMBER.match(last)
    sentences = collections.Counter(s.strip() for s in re.split(r"[.\n]\s", answer) if s.strip())
    if found is None or max(sentences.values()) >= _REPEATS:
        return None
    kept = body.strip() if body.strip() and _CLOSING.fullmatch(last.strip()) else answer.strip()
    number = found.group(1).rstrip(",")
    return f"{kept}\n\nThe final answer is \\boxed{{{number}}}."


def trained_chats(answers: Iterable[dict[str, Any]], prompts: int) -> Iterator[dict[str, Any]]:
    """Yield the conversations to train on, in the order of their prompts.

    Args:
        answers: rows of `scripts/regenerate.py`; those cut at the limit are left out.
        prompts: prompts of the file; the last `HELD_OUT` are left out.
    """
    for row in sorted(answers, key=lambda row: row["prompt_index"]):
        if row["prompt_index"] >= prompts - HELD_OUT or row["finish_reason"] != "stop":
            continue
        asked, said = row["messages"]
        if (text := trained_form(said["content"])) is not None:
            answer = {"role": "assistant", "content": text}
            yield {"messages": [asked, answer], "prompt_index": row["prompt_index"]}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines.

    Raises:
        DataError: no such file, or a line that is not an object.
    """
    if not path.is_file():
        raise DataError(f"no file {path}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").strip("\n").split("\n"), 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise DataError(f"{path}:{number} is not a JSON object") from None
    return rows


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Write JSON lines whole or not at all; return how many."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
    return len(lines)
