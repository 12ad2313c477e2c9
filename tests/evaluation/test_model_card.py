"""What stands on a model card: the head's facts, measured figures, and no folder of a machine."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.core.errors import DataError
from specjax.evaluation.model_card import model_card, runs_of, training_part
from specjax.evaluation.records import Record
from specjax.heads.export import Exported, Verifier, export
from specjax.io.hf import TensorReader
from tests.heads.dflash import cases

KEPT = np.arange(1, 40, 2)
TARGET = Verifier("owner/target-1b")


def exported(to: Path, **changes: Any) -> Exported:
    head, params = cases.tiny(cases.DSPARK, KEPT)
    head = dataclasses.replace(head, temperatures=(1.0, 1.25, 1.5, 2.0, 0.8))
    lent = cases.borrowed()
    return export(head, params, lent, to, layout="speculators", verifier=TARGET, **changes)


def test_a_card_says_what_was_measured(rows: list[Record], tmp_path: Path) -> None:
    done = exported(tmp_path)
    # The tests' known head goes by the name of EAGLE-3.
    card = model_card(done, TARGET, "bfloat16", runs_of(rows, "eagle3"), "By hand.")
    assert "base_model: owner/target-1b" in card and "draft head for target-1b" in card
    assert "| draft vocabulary | 20 of 40 tokens |" in card
    assert "| confidence temperatures | 1.00, 1.25, 1.50, 2.00, 0.80 |" in card
    line = next(line for line in card.splitlines() if line.startswith("| made here |"))
    # 2 of 3 drafts are right in every round: 3 tokens of which one is the target's.
    assert "| 3.00 |" in line and "| 4 of 4 |" in line
    assert card.rstrip().endswith("By hand.")
    assert "speculators" in card and "holds no" not in card


def test_a_card_of_a_card_keeps_the_training_alone(tmp_path: Path) -> None:
    first = model_card(exported(tmp_path), TARGET, "bfloat16", training="By hand.\n\nTwice.")
    assert training_part(first) == "By hand.\n\nTwice."


def test_a_card_says_what_the_file_lacks(tmp_path: Path) -> None:
    done = exported(tmp_path, bodies_only=True)
    card = model_card(done, Verifier("/somewhere/models/target"), "float32")
    assert "holds no embedding and no output rows" in card
    assert "base_model" not in card and "/somewhere" not in card
    assert "Nothing was measured" in card
    sizes = [np.prod(shape) for shape in TensorReader(tmp_path).shapes.values()]
    assert f"| weights on disk | {sum(sizes):,} in float32 |" in card


def test_runs_of_another_head_are_none(rows: list[Record]) -> None:
    with pytest.raises(DataError, match="no run of a head of kind 'dspark'"):
        runs_of(rows, "dspark")


def test_the_training_part_names_no_folder() -> None:
    card = (
        "---\ntags: [a]\n---\n\n# title\n\nTrained.\n\n- Command: `python train/eagle3.py"
        " --target /srv/me/models/smollm2 --data ~/x/answers.jsonl --out ../runs/e`\n"
        "- See https://example.org/a/b and owner/name, 1/2.\n"
    )
    assert training_part(card) == (
        "Trained.\n\n- Command: `python train/eagle3.py --target smollm2 --data answers.jsonl"
        " --out e`\n- See https://example.org/a/b and owner/name, 1/2."
    )
