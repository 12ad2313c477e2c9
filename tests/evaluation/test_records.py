"""The schema of results.jsonl, and what a run of known acceptance writes into it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specjax.core.errors import DataError
from specjax.evaluation import records, runner
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.records import Record
from specjax.evaluation.subject import Opened, Subject
from specjax.heads.ngram import NgramHead
from tests.decode.mixing import Mixed, Script
from tests.evaluation.conftest import NEW, cell_of
from tests.evaluation.known import VOCAB

SCHEMA = {
    "schema_version": int,
    "run": str,
    "cell": str,
    "baseline_cell": str,
    "error": type(None),
    "fingerprints": dict,
    "requests": int,
    "prompts_sha256": str,
    "prompts_source": str,
    "chat_template": bool,
    "target": str,
    "head": str,
    "num_speculative_tokens": int,
    "temperature": float,
    "concurrency": int,
    "dtype": str,
    "prompts": int,
    "identical": int,
    "output_tokens": int,
    "output_tokens_per_second": float,
    "decode_tokens_per_second": float,
    "baseline_output_tokens_per_second": dict,
    "speedup": float,
    "speedup_same_dtype": float,
    "time_to_first_token_seconds": dict,
    "time_per_output_token_seconds": dict,
    "latency_seconds": dict,
    "compile_seconds": float,
    "peak_memory_bytes": int,
    "drafted_tokens": int,
    "verified_tokens": int,
    "accepted_tokens": int,
    "acceptance_rate_per_position": list,
    "acceptance_rate_per_position_conditional": list,
    "configuration": dict,
    "machine": dict,
}


def test_every_record_has_the_schema(rows: list[Record]) -> None:
    for row in json.loads(json.dumps(rows, allow_nan=False)):
        for key, kind in SCHEMA.items():
            assert isinstance(row[key], kind), key
        assert row["configuration"]["num_speculative_tokens"] == 3
        assert row["machine"]["jax"]


def test_baseline_record(rows: list[Record]) -> None:
    base = rows[0]
    assert (base["head"], base["num_speculative_tokens"]) == ("none", 0)
    assert set(base["baseline_output_tokens_per_second"]) == {"float32", "bfloat16"}
    fastest = max(base["baseline_output_tokens_per_second"].items(), key=lambda item: item[1])
    assert (base["dtype"], base["output_tokens_per_second"]) == fastest
    assert base["speedup"] == 1.0
    assert base["identical"] == 4
    # F69: nothing was drafted, so there is nothing to report.
    assert base["mean_acceptance_length"] is None
    assert base["acceptance_rate"] is None
    assert base["acceptance_rate_per_position"] == []


def test_known_acceptance_comes_out(rows: list[Record]) -> None:
    """Of 3 drafts 2 are right; the last round's budget leaves room for 2."""
    row = rows[1]
    assert (row["head"], row["num_speculative_tokens"]) == ("eagle3", 3)
    assert row["output_tokens"] == 4 * NEW
    assert row["identical"] == row["prompts"] == 4
    assert row["differing"] == 0
    assert row["flip_rate"] == 0
    assert row["draft_rounds"] == 16
    assert row["drafted_per_position"] == [16, 16, 12]
    assert row["accepted_per_position"] == [16, 16, 0]
    assert row["mean_acceptance_length"] == 3.0
    assert row["acceptance_rate"] == pytest.approx(32 / 44)
    assert row["acceptance_rate_per_position"] == [1.0, 1.0, 0.0]
    assert row["acceptance_rate_per_position_conditional"] == [1.0, 1.0, 0.0]
    # All prompts fare alike, so resampling them changes nothing.
    assert row["mean_acceptance_length_interval"] == (3.0, 3.0)
    assert row["acceptance_rate_per_position_interval"] == ((1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    counts = (row["drafted_tokens"], row["verified_tokens"], row["accepted_tokens"])
    assert counts == (48, 44, 32)
    assert row["calibration"] is None  # this head has no confidences
    assert (row["accuracy"], row["answers_known"]) == (None, 0)
    shares = row["time_shares"]
    assert shares["draft"] + shares["verify"] + shares["other"] == pytest.approx(1)


def test_speedup_is_against_the_faster_baseline(rows: list[Record]) -> None:
    row = rows[1]
    repeats = row["baseline_output_tokens_per_second_repeats"][row["baseline_dtype"]]
    paired = [a / b for a, b in zip(row["output_tokens_per_second_repeats"], repeats, strict=True)]
    assert (row["speedup_low"], row["speedup_high"]) == (min(paired), max(paired))


def least(**given: Any) -> dict[str, Any]:
    """A record with all that every one has."""
    return {"schema_version": 2} | dict.fromkeys(records._EVERY) | given


def test_append_keeps_earlier_records_and_leaves_no_partial_file(tmp_path: Path) -> None:
    for i in range(2):
        records.append([least(n=i, x=float("inf"))], tmp_path)
    assert [row["n"] for row in records.read(tmp_path)] == [0, 1]
    assert records.read(tmp_path)[0]["x"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_records_that_are_not_whole_are_told_and_skipped(tmp_path: Path, capsys: Any) -> None:
    """A truncated line, another schema, what is no record: the others are read."""
    path = tmp_path / "results.jsonl"
    lines = [json.dumps(least(cell=0)), "", "3", '{"schema_version": 99}']
    half = least(cell=2)
    del half["head"]
    told = "\n".join(lines).encode() + b'\n{"x": "\xff"}\n' + json.dumps(half).encode()
    path.write_bytes(told + b'\n{"schema_ver')
    # What is added next is not glued to the truncated line.
    records.append([least(cell=1)], tmp_path)
    faults: list[str] = []
    assert [row["cell"] for row in records.read(tmp_path, faults.append)] == [0, 1]
    assert [fault.split(":")[1] for fault in faults] == ["3", "4", "5", "6", "7"]
    assert "schema_version 99" in faults[1] and "no whole record" in faults[4]
    assert "a record without head" in faults[3]
    records.read(tmp_path)
    assert capsys.readouterr().err.count("specjax: warning: ") == 5
    records.forget({0}, tmp_path)
    assert [row["cell"] for row in records.read(tmp_path)] == [1]


def test_no_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no results at .*results\.jsonl"):
        records.read(tmp_path)


def test_a_failure_is_a_record_of_the_schema(config: EvalConfig) -> None:
    context = records.Context("now", {"jax": "0"})
    row = records.failure(cell_of(config), MemoryError("much\n  too much"), "tiny", context)
    assert row["error"] == "MemoryError: much too much"
    assert row["head"] == row["head_source"] == "known"
    assert row["configuration"]["num_speculative_tokens"] == row["num_speculative_tokens"] == 3
    assert row["speedup"] is row["identical"] is None
    assert set(row) >= {"schema_version", *records._EVERY}
    mistake = records.failure(cell_of(config), DataError("no file"), "tiny", context)
    assert mistake["error"] == "no file"


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "replace", full)
    with pytest.raises(DataError, match="No space left"):
        records.write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_head_with_confidences_is_judged_whatever_the_schedule(
    config: EvalConfig, opened: Opened, base: Subject, subject: Subject
) -> None:
    """Confidences are judged on rounds verified in full, stages timed on scheduled ones."""
    head = Mixed(NgramHead(), "greedy", VOCAB, confident=True)
    sure = dataclasses.replace(opened, own_head=(head, Script((), subject.head_params)))
    engine = dataclasses.replace(config.engine, verification="threshold")
    cell = cell_of(dataclasses.replace(config, engine=engine, repeats=1))
    row = list(runner.measure([cell], sure, base))[1]
    found = row["calibration"]
    assert 0 <= found["expected_calibration_error"] <= 1
    assert len(found["expected_calibration_error_per_position"]) == 3
    judged = sum(each["count"] for each in found["bins"])
    assert found["rounds"] < judged <= 3 * found["rounds"]
    assert row["time_shares"]["rounds_timed"] > 0
    assert row["identical"] == 4
    assert row["verified_tokens"] < row["drafted_tokens"]
