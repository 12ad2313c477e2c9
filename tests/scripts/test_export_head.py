"""The command that writes a trained head for publication."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from scripts import export_head
from specjax import heads, targets
from specjax.evaluation import records
from specjax.heads.base import Borrowed, borrow
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.io.hf import TensorReader, read_config
from tests.training.files import write_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head that was trained for it, with its draft vocabulary."""
    root = tmp_path_factory.mktemp("export")
    write_target(root / "target")
    target, weights = targets.load(root / "target", "bfloat16")
    info = target.info
    head = Eagle3Head.for_target(info, info.draft_block, Eagle3Config(taps=(1, 2)), 64)
    kept = np.arange(0, 2 * 64, 2)
    params = head.init(jax.random.key(0), borrow(target, weights), kept)
    heads.save(head, params, root / "head", "float32")
    (root / "head" / "README.md").write_text("# eagle3\n\n- Data: /srv/me/answers.jsonl.\n")
    return root


def command(folder: Path, out: Path, *more: str) -> list[str]:
    return [str(folder / "head"), f"--target={folder / 'target'}", f"--out={out}", *more]


def test_a_head_leaves_with_its_card(folder: Path, tmp_path: Path, capsys: Any) -> None:
    words = command(folder, tmp_path, "--layout=speculators", "--verifier=owner/tiny")
    assert export_head.main(words) == 0
    assert "eagle3 head in speculators layout" in capsys.readouterr().out
    config = read_config(tmp_path)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/tiny"
    card = (tmp_path / "README.md").read_text()
    assert "base_model: owner/tiny" in card and "- Data: answers.jsonl." in card
    target, weights = targets.load(folder / "target", "bfloat16")
    table = TensorReader(tmp_path).read("embed_tokens.weight")
    np.testing.assert_array_equal(table, target.input_embedding(weights))  # F39


def test_bodies_alone_are_small_and_come_back(folder: Path, tmp_path: Path, capsys: Any) -> None:
    words = command(folder, tmp_path, "--layout=original", "--bodies-only", "--verifier=owner/tiny")
    assert export_head.main(words) == 0
    assert "left out, the target's rows: output" in capsys.readouterr().out
    target, weights = targets.load(folder / "target", "bfloat16")
    lent = borrow(target, weights)
    head, params = heads.load(tmp_path, target.info, "bfloat16", borrowed=lent)
    first, before = heads.load(folder / "head", target.info, "bfloat16")
    assert head == first
    jax.tree.map(np.testing.assert_array_equal, before, params)
    assert "holds no embedding and no output rows" in (tmp_path / "README.md").read_text()


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert export_head.main(command(folder, tmp_path, "--layout=zlab")) == 2
    error = capsys.readouterr().err
    assert error.startswith("specjax: error: eagle3 heads cannot be written in 'zlab'")
    record = dict.fromkeys(records._EVERY) | {"head": "dflash", "error": None}
    record["schema_version"] = records.SCHEMA_VERSION
    (tmp_path / "results.jsonl").write_text(json.dumps(record))
    more = ("--layout=original", f"--results={tmp_path / 'results.jsonl'}")
    assert export_head.main(command(folder, tmp_path / "x", *more)) == 2
    assert "no run of a head of kind 'eagle3'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_file_that_reads_back_otherwise_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    load = heads.load

    def damaged(path: Path, info: Any, dtype: str, borrowed: Borrowed) -> Any:
        head, params = load(path, info, dtype, borrowed=borrowed)
        if Path(path) == tmp_path:
            params = params.replace(fc=params.fc.at[0, 0].add(1))
        return head, params

    monkeypatch.setattr(heads, "load", damaged)
    assert export_head.main(command(folder, tmp_path, "--layout=original")) == 2
    assert "does not read back" in capsys.readouterr().err
