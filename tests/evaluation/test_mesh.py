"""An evaluation on a mesh: weights read share by share, and the texts and drafts of one device."""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest

from specjax import eval as door
from specjax import heads
from specjax.core.errors import ConfigError
from specjax.core.mesh_config import MeshConfig
from specjax.decode import Engine, EngineConfig
from specjax.evaluation import measure, records, subject
from specjax.evaluation.config import EvalConfig
from specjax.heads.base import NullHead
from specjax.io.hf import TensorReader, save_checkpoint
from tests.decode import matrix
from tests.decode.adversary import CONFIGS, VOCAB, tiny

pytestmark = pytest.mark.devices8
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 64}
HEADS = ("eagle3", "dflash")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A tiny target, its tokenizer, two heads for it and prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("mesh")
    target, params = tiny("llama", **WIDE)
    save_checkpoint(target.specs(), params, CONFIGS["llama"] | WIDE, path / "target")
    for kind in HEADS:
        heads.save(*matrix.make(kind, target.info), path / kind)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path / "target")
    turns = [["w3 w4 w5 w3 w4"], ["w6 w7"]]
    lines = (json.dumps({"turns": each}) for each in turns)
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return path


def asked(folder: Path, out: Path, *words: str) -> list[str]:
    return [
        f"--target={folder / 'target'}",
        "--head=" + ", ".join(str(folder / kind) for kind in HEADS),
        f"--prompts={folder / 'prompts.jsonl'}",
        f"--out={out}",
        "Eval.chat_template=False",
        "Eval.baseline_dtypes=('float32',)",
        "Eval.max_new_tokens=9",
        "Eval.num_speculative_tokens=2",
        "Eval.concurrency=2",
        "Eval.repeats=1",
        *words,
    ]


def evaluate(folder: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    assert door.main(asked(folder, out, *words)) == 0
    return records.read(out)


@pytest.mark.slow
def test_an_evaluation_is_that_of_one_device(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, drafts accepted, and all else that a record says."""
    plain, said = measure._run, []

    def listening(engine: Engine, requests: Any, notify: Any) -> Any:
        done = plain(engine, requests, notify)
        said.append([(r.token_ids, r.drafted, r.accepted) for r in done.results])
        return done

    monkeypatch.setattr(measure, "_run", listening)
    one = evaluate(folder, tmp_path / "one", "Eval.time_shares=False")
    alone = said.copy()
    said.clear()
    many = evaluate(folder, tmp_path / "many", "Mesh.data=2", "Mesh.tensor=4", "--trace=1")
    assert said == alone and len(said) == 6  # each run has its warm-up
    assert [row["head"] for row in many] == ["none", *HEADS]
    assert all(row["identical"] == row["prompts"] == 2 for row in many)
    assert all(row["time_shares"] and row["trace"][0]["same_text"] for row in many[1:])
    assert {row["mesh"] for row in many} == {"data=2 tensor=4"}
    assert {row["mesh"] for row in one} == {"one device"}
    assert {row["cell"] for row in one}.isdisjoint(row["cell"] for row in many)
    assert "Spread over 8 devices: data=2 tensor=4." in many[0]["notes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("Mesh.tensor=64",), "needs 64 devices, there are 8"),
        (("Mesh.data=4",), "Eval.concurrency 2 does not divide over data x fsdp of 4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_read(
    folder: Path, tmp_path: Path, words: tuple[str, ...], message: str, capsys: Any
) -> None:
    assert door.main(asked(folder, tmp_path / "out", *words)) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_each_device_reads_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device reads, or holds, more of a matrix than its part; its part goes nowhere else."""
    plain, read = TensorReader.read, collections.defaultdict(list)

    def watched(self: TensorReader, name: str, index: Any = None) -> Any:
        part = plain(self, name, index)
        if len(self.shapes[name]) == 2:
            read[name].append(part.size * 8 / math.prod(self.shapes[name]))
        return part

    monkeypatch.setattr(TensorReader, "read", watched)
    config = EvalConfig(
        target=str(folder / "target"),
        head=str(folder / "eagle3"),
        prompts="not read here",
        baseline_dtypes=("float32",),
        engine=EngineConfig(mesh=MeshConfig(tensor=8)),
    )
    opened = subject.open_target(config)
    bare = subject.Subject(opened.target, opened.params, NullHead(), (), (), "", "")
    found = subject.with_head(bare, opened, config)
    assert opened.target.layout is not None and opened.target.layout.mesh.shape["tensor"] == 8
    for tree, whole in ((found.params["float32"], 0), (found.head_params, 1)):
        matrices = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim == 2]
        parts = [leaf.nbytes / leaf.addressable_shards[0].data.nbytes for leaf in matrices]
        assert parts.count(1) == whole and parts.count(8) == len(parts) - whole
    assert read.pop("fc.weight") == [8]  # what fuses the taps is small, and read once for all
    assert len(read) > 20 and {share for shares in read.values() for share in shares} == {1}


def test_the_embedded_default_lies_on_a_mesh() -> None:
    config = EvalConfig(engine=EngineConfig(mesh=MeshConfig(tensor=2)))
    opened = subject.open_target(config)
    leaves = jax.tree.leaves((opened.params, opened.own_head[1]))
    assert {len(leaf.sharding.device_set) for leaf in leaves} == {2}
    with pytest.raises(ConfigError, match="vocab of 512 does not divide over tensor of 3"):
        subject.open_target(EvalConfig(engine=EngineConfig(mesh=MeshConfig(tensor=3))))
