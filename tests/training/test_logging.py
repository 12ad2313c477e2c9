import io
import json
from pathlib import Path

from rich.console import Console

from specjax.training.logging import Display, JsonLines


def test_cut_drops_later_and_torn_records(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "train.jsonl")
    log.cut(3)  # nothing there yet
    for step in (1, 2, 3):
        log.write({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    log.cut(2)
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 2]
    assert log.last() == {"step": 2} and list(tmp_path.iterdir()) == [log.path]


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Display(20, Console(file=out)) as display:
        display.begin(5)
        display.step(6)
        display.record({"step": 6, "loss": 1.25, "acceptance": 0.5, "other": [1]}, 120)
    assert out.getvalue() == "step 6/20  loss 1.2500  acceptance 0.500  2 min left\n"
