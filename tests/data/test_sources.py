"""The same rows from every kind of source; each mistake with its place."""

import json
import os
import subprocess
import sys

import pytest

from specjax.core.errors import DataError
from specjax.data.sources import RowError, digest, read_rows, split_list

ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "é"}]}
    for i in range(3)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The rows in every form."""
    import datasets

    folder = tmp_path_factory.mktemp("sources")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.json").write_text(json.dumps(ROWS, indent=1))
    data = datasets.Dataset.from_list(ROWS)
    data.to_parquet(folder / "c.parquet")
    data.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": data, "test": data.select([2])}).save_to_disk(folder / "splits")
    (folder / "many" / "sub").mkdir(parents=True)
    (folder / "many" / "1.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (folder / "many" / "1.settings.json").write_text("{}")
    (folder / "many" / "sub" / "2.json").write_text(json.dumps(ROWS[1:]))
    return folder


@pytest.mark.parametrize("name", ["a.jsonl", "b.json", "c.parquet", "saved", "splits", "many"])
def test_same_rows_from_every_kind(folder, name):
    assert [row for _, row in read_rows(folder / name)] == ROWS


def test_places_and_splits(folder):
    assert next(iter(read_rows(folder / "a.jsonl")))[0] == f"{folder}/a.jsonl:1"
    assert [place for place, _ in read_rows(folder / "c.parquet")][2].endswith("c.parquet, row 3")
    assert [row for _, row in read_rows(f"{folder}/splits:test")] == ROWS[2:]
    with pytest.raises(DataError, match="no split 'dev' but train, test"):
        list(read_rows(f"{folder}/splits:dev"))
    with pytest.raises(DataError, match="has no splits"):
        list(read_rows(f"{folder}/saved:train"))


def test_keys_of_other_rows_do_not_leak(tmp_path):
    """Arrow gives every row of a column the keys of all; a missing one stays missing."""
    import datasets

    rows = [{"messages": [{"role": "user", "content": "x", "name": "n"}]}, ROWS[0]]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    assert [row for _, row in read_rows(tmp_path / "x.parquet")] == rows


def test_rows_that_are_no_objects_are_told(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a"\n[1]\n')
    found = [row for _, row in read_rows(tmp_path / "x.jsonl")]
    assert found[0] == {"a": 1}
    assert [row.reason for row in found[1:] if isinstance(row, RowError)] == [
        "not JSON in UTF-8",
        "not a JSON object",
    ]
    assert "x.jsonl:2: not a line" in str(found[1])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.jsonl", "no such file"),
        ("hf://owner/name", "is written hf://datasets/OWNER/NAME"),
        ("hf://datasets/name", "is written hf://datasets/OWNER/NAME"),
    ],
)
def test_sources_that_are_none(source, message):
    with pytest.raises(DataError, match=message):
        list(read_rows(source))


def test_broken_and_empty_files(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match=r"cannot read .*x\.parquet"):
        list(read_rows(tmp_path / "x.parquet"))
    (tmp_path / "sub").mkdir()
    with pytest.raises(DataError, match="holds no file ending in"):
        list(read_rows(tmp_path / "sub"))
    (tmp_path / "e.json").write_text("[]")
    with pytest.raises(DataError, match="is empty"):
        list(read_rows(tmp_path / "e.json"))


def test_the_hub_without_a_connection():
    """One clear line, in a process that is told to stay offline."""
    code = (
        "from specjax.data.sources import read_rows\n"
        "try: list(read_rows('hf://datasets/nobody/nothing'))\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("DataError cannot load hf://datasets/nobody/nothing: ")
    assert run.stdout.count("\n") == 1 and "give a file or folder" in run.stdout


def test_digest_follows_contents_and_order(folder, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((folder / "a.jsonl").read_bytes())
    first, second = folder / "a.jsonl", folder / "b.json"
    assert digest([copy, second]) == digest([first, second]) != digest([second, first])
    before = digest([folder / "many"])
    assert before == digest([folder / "many" / "1.jsonl", folder / "many" / "sub" / "2.json"])
    copy.write_text("{}\n")
    assert digest([copy]) != digest([first])
    assert digest([folder / "splits"]) != before


def test_several_sources_in_one_setting():
    assert split_list("a, b,hf://datasets/o/n:test") == ("a", "b", "hf://datasets/o/n:test")
    assert split_list(("a,b", "c")) == ("a,b", "c")
