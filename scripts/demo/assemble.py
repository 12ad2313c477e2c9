"""Everything that ships in specjax/demo/, and the model card that says how it was made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.demo import texts
from scripts.demo.heads import share_in_form
from specjax.core.errors import DataError
from specjax.demo import HEADS, TARGET

LIMIT = 15_000_000
"""Bytes that all of it may take."""
SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SAMPLES = 10


def files(runs: Path, prompts: Path, out: Path) -> None:
    """Write target, heads and prompts.

    Heads go without embedding and output layer, which are the target's.

    Args:
        runs: folder of the training runs.
        prompts: the prompt file whose last prompts no run has seen.
        out: the package's folder.
    """
    from specjax import heads, targets
    from specjax.heads.base import borrow
    from specjax.heads.export import OWN, Verifier, export

    shutil.copytree(runs / "target", out / TARGET, dirs_exist_ok=True)
    target, params = targets.load(runs / "target", "bfloat16")
    borrowed = borrow(target, params)
    for name in HEADS:
        head, weights = heads.load(
            runs / "heads" / name / "head", target.info, "bfloat16", borrowed=borrowed
        )
        export(
            head,
            weights,
            borrowed,
            out / "heads" / name,
            layout=OWN,
            verifier=Verifier(f"specjax/demo/{TARGET}"),
            bodies_only=True,
        )
    first, *rows = texts.read_rows(prompts)[-texts.SHIPPED :]
    # The first is much shorter: at the end, so that a short run compiles one length of prompts.
    asked = ({"turns": [row["turns"][0] + SUFFIX]} for row in (*rows, first))
    texts.write_rows(asked, out / "prompts.jsonl")


def card(runs: Path, prompts: Path, out: Path, results: Path) -> None:
    """Write the model card.

    Args:
        runs: folder of the training runs.
        prompts: the prompt file.
        out: the package's folder.
        results: results.jsonl of the evaluation on the shipped prompts.

    Raises:
        DataError: the package has become too large.
    """
    log = texts.read_rows(runs / "target_run" / "train.jsonl")
    last = max((row for row in log if "heldout_loss" in row), key=lambda row: row["step"])
    said = texts.read_rows(runs / "heldout_answers.jsonl")
    said.sort(key=lambda row: row["prompt_index"])
    answers = texts.read_rows(runs / "answers.jsonl")
    text = _CARD.format(
        parameters=_parameters(out / TARGET),
        prompts=len(texts.read_rows(prompts)),
        chats=len(texts.read_rows(runs / "chats.jsonl")),
        held_out=texts.HELD_OUT,
        shipped=texts.SHIPPED,
        steps=last["step"],
        target_tokens=sum(row["tokens"] for row in log),
        loss=last["heldout_loss"],
        answer_loss=last["heldout_answer_loss"],
        accuracy=last["heldout_answer_accuracy"],
        form=share_in_form(runs / "heldout_answers.jsonl"),
        answers=len(answers),
        answer_tokens=sum(row["num_tokens"] for row in answers),
        speed=_speed(texts.read_rows(results)),
        curves="\n".join(_curve(name, runs / "heads" / name / "train.jsonl") for name in HEADS),
        samples="\n".join(_sample(row) for row in said[-texts.SHIPPED :][:SAMPLES]),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size:,} bytes")
    if size > LIMIT:
        raise DataError(f"{out} holds {size:,} bytes, more than {LIMIT:,}")


def _parameters(folder: Path) -> int:
    from specjax import targets
    from specjax.core.params import count
    from specjax.io.hf import read_config

    return count(targets.from_config(read_config(folder)).specs())


def _speed(rows: list[dict[str, Any]]) -> str:
    """A table of what was measured, one line a head."""
    lines = [
        "| head | drafts | mean acceptance length | speedup | same dtype | identical |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["head"] == "none" or row["error"]:
            continue
        lines.append(
            f"| {row['head']} | {row['num_speculative_tokens']} |"
            f" {row['mean_acceptance_length']:.2f} | {row['speedup']:.2f} |"
            f" {row['speedup_same_dtype']:.2f} | {row['identical']}/{row['prompts']} |"
        )
    machine = ", ".join(f"{key} {value}" for key, value in rows[-1]["machine"].items() if value)
    return "\n".join([*lines, "", f"Machine: {machine}."])


def _curve(name: str, path: Path) -> str:
    """A line of acceptance lengths by tokens seen."""
    points, tokens = [], 0
    for row in texts.read_rows(path):
        tokens += row["tokens"]
        if (found := row.get("decoded_mean_acceptance_length")) is not None:
            points.append(f"{found:.2f} at {tokens / 1000:.0f}k")
    return f"- {name}: {', '.join(points)}"


def _sample(row: Mapping[str, Any]) -> str:
    asked, answer = (message["content"] for message in row["messages"])
    ending = "" if row["finish_reason"] == "stop" else "\n[cut at the limit]"
    return f"```text\n{json.dumps(asked.removesuffix(SUFFIX))}\n\n{answer}{ending}\n```\n"


_CARD = """---
license: apache-2.0
library_name: specjax
tags: [speculative-decoding, demonstration]
---

# The demonstration target and its five draft heads

A Gemma-4-layout model of {parameters:,} parameters, trained from scratch to talk like a small model
that solves grade-school problems, and a draft head of each kind. They show every part of SpecJAX
without a download: `python -m specjax.eval`. **The target's arithmetic is wrong almost always**;
it is good for nothing else.

## How they were made

    python scripts/regenerate.py --target SmolLM2-135M-Instruct --prompts train_gsm8k.jsonl \\
        --output answers.jsonl --suffix gsm8k --max-new-tokens 248
    python scripts/train_demo.py --prompts train_gsm8k.jsonl --answers answers.jsonl --out runs/demo

- Prompts: the {prompts:,} training questions of GSM8K (MIT, `LICENSE-GSM8K`). The last {held_out}
  were seen by no training run; the last {shipped} of these are `prompts.jsonl`.
- Texts of the target: answers of SmolLM2-135M-Instruct (Apache-2.0, `LICENSE-SmolLM2`). It hardly
  ever fills the box it is asked for, so the script takes the answers that ended by themselves, do
  not repeat a sentence three times and have a number in their last line, {chats:,} in all, and puts
  that number into a closing line, `The final answer is \\boxed{{…}}.`
- Tokenizer: byte-level BPE of 4,096 tokens learnt from these texts; digits stand alone, `<mask>` is
  in reserve for heads that draft blocks.
- Target: 12 layers (three sliding, one full, three times), {steps:,} steps, {target_tokens:,}
  tokens, questions included. Held out: loss {loss:.3f}, on answers {answer_loss:.3f}, next token
  right in {accuracy:.1%}. **{form:.0%} of its greedy answers to the {held_out} held-out prompts end
  in a filled box and the stop token.**
- Heads: `configs/train/demo_*.gin`, on the target's own greedy answers to {answers:,} training
  prompts ({answer_tokens:,} tokens). They take embedding and output layer from the target.

## Measured

`python -m specjax.eval Eval.num_prompts={shipped}`: float32, one prompt at a time; speedups are
against the faster of the float32 and bfloat16 baselines.

{speed}

Mean acceptance length at 4 drafts on 16 held-out rows, by tokens of training:

{curves}

## What the target says

Its greedy answers to ten of the prompts that ship:

{samples}"""
