import json
from pathlib import Path

import pytest

from scripts import show_masks
from tests.training.files import write_target


def test_shows_the_supervised_part_and_the_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_target(tmp_path / "target")
    rows = [{"prompt": "two and two?", "response": "four"}, {"text": "x"}]
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--target", str(tmp_path / "target"), "--data", str(data)]
    assert show_masks.main(words) == 0
    shown = capsys.readouterr().out
    assert "assistant\n>>four<|im_end|><<\n" in shown
    assert "1 rows usable, 0 of them cut" in shown
    assert "left out: 1 malformed (unknown format)" in shown and "d.jsonl:2: expected" in shown
    assert show_masks.main([*words[:3], str(tmp_path / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err
