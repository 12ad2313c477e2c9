"""The demonstration target's own answers, and the heads that learn from them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.demo import texts
from specjax.core.errors import TrainingError
from specjax.demo import HEADS

LONGEST = 320
"""Most tokens of an answer."""

_ROOT = Path(__file__).resolve().parents[2]


def run(words: Sequence[str | Path]) -> None:
    """Run python at the project's root, to its end.

    Args:
        words: of the command line, behind `python`.

    Raises:
        TrainingError: it failed, or was interrupted.
    """
    command = [sys.executable, *map(str, words)]
    code = subprocess.run(command, cwd=_ROOT, check=False).returncode
    if code:
        raise TrainingError(f"{' '.join(command[1:3])} ended with {code}; the same command goes on")


def answers(target: Path, prompts: Path, out: Path, count: int) -> float:
    """Answer prompts with the target: some to train heads on, and those held out.

    Args:
        target: folder of the trained target.
        prompts: the prompt file.
        out: gets `answers.jsonl` and `heldout_answers.jsonl`.
        count: training prompts answered, from the first.

    Returns:
        The share of held-out answers that end in the trained form.
    """
    rows = texts.read_rows(prompts)
    texts.write_rows(rows[-texts.HELD_OUT :], out / "heldout_prompts.jsonl")
    count = min(count, len(rows) - texts.HELD_OUT)
    asked = (
        (out / "heldout_prompts.jsonl", out / "heldout_answers.jsonl", texts.HELD_OUT),
        (prompts, out / "answers.jsonl", count),
    )
    for source, output, limit in asked:
        words: list[str | Path] = ["scripts/regenerate.py", "--target", target]
        words += ["--prompts", source, "--output", output, "--limit", str(limit)]
        words += ["--suffix", "gsm8k", "--dtype", "float32", "--max-new-tokens", str(LONGEST)]
        run(words)
    return share_in_form(out / "heldout_answers.jsonl")


def share_in_form(path: Path) -> float:
    """Return the share of answers that fill the box and stop."""
    said = texts.read_rows(path)
    good = (
        row["finish_reason"] == "stop" and texts.in_form(row["messages"][-1]["content"])
        for row in said
    )
    return sum(good) / max(len(said), 1)


def train(target: Path, out: Path) -> None:
    """Train all heads on the target's answers, one after the other."""
    for name in HEADS:
        if (out / name / "head" / "config.json").is_file():
            continue
        words: list[str | Path] = [f"train/{name}.py", f"--gin_file=train/demo_{name}.gin"]
        words += ["--target", target, "--data", out.parent / "answers.jsonl", "--out", out / name]
        run(words)
