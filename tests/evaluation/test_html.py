"""Pages: one file that loads nothing, whole, with every section that there are data for."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specjax.evaluation import records
from specjax.evaluation.html import figures, page, palette, series
from specjax.evaluation.records import Record

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Outline(HTMLParser):
    """Checks nesting; collects ids and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.loads.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def sweep(rows: list[Record]) -> list[Record]:
    """Return records of two heads over two widths and two batches."""
    found = [rows[0]]
    for head in ("eagle3", "dspark"):
        for drafts in (1, 3):
            for batch in (1, 2):
                row = copy.deepcopy(rows[1])
                row |= {"head": head, "num_speculative_tokens": drafts, "concurrency": batch}
                row["configuration"] |= {"num_speculative_tokens": drafts, "concurrency": batch}
                row |= {"speedup_low": drafts + 0.05, "speedup_high": drafts + 0.3}
                row |= {"speedup": drafts + 0.1 * batch, "cell": f"{head} {drafts} {batch}"}
                for key in [key for key in row if key.startswith("acceptance_rate_per_position")]:
                    row[key] = row[key][:drafts] if row[key] else row[key]
                bins = [{"count": 3, "confidence": 0.4, "accepted": 0.5}]
                row["calibration"] = {"expected_calibration_error": 0.1, "bins": bins}
                found.append(row)
    return found


@pytest.fixture(scope="module")
def written(rows: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    page.write(directory, sweep(rows))
    return directory


def test_the_page_is_whole_and_loads_nothing(written: Path) -> None:
    outline = Outline((written / "report.html").read_text())
    assert outline.loads == ["data:,"]
    assert len(set(outline.ids)) == len(outline.ids)
    sections = {"headline", "figures", "tables", "machine", "configuration"}
    names = {"speedup", "tokens", "acceptance", "acceptance_conditional", "heat_map"}
    names |= {"time_shares", "calibration"}
    assert sections | names <= set(outline.ids)
    for name in names:
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (written / "figures" / f"{name}.svg").read_text()
    assert "@import" not in (written / "report.html").read_text()


def test_the_headline_is_the_fastest_run(written: Path) -> None:
    text = " ".join((written / "report.html").read_text().split())
    assert "Best: EAGLE-3, 3 drafts per round, batch 2" in text
    assert "3.20" in text


def test_a_range_that_reaches_the_baseline_is_told(rows: list[Record]) -> None:
    row = copy.deepcopy(rows[1]) | {"speedup": 1.1, "speedup_low": 0.9, "speedup_high": 1.2}
    assert "some repeats are below the baseline" in page.page([rows[0], row], [])


def test_only_what_there_are_data_for(rows: list[Record]) -> None:
    row = copy.deepcopy(rows[1]) | {"time_shares": None, "calibration": None, "speedup": 0.5}
    both = [rows[0], row]
    drawn = figures.draw_all(both)
    assert [each.name for each in drawn] == ["speedup", "acceptance", "acceptance_conditional"]
    assert "Nothing here beats not speculating" in page.page(both, drawn)
    alone = page.page([rows[0]], figures.draw_all([rows[0]]))
    assert "<svg" not in alone and 'id="headline"' not in alone
    Outline(alone)


def test_text_is_escaped_and_failures_are_shown(rows: list[Record]) -> None:
    bad = copy.deepcopy(rows[1]) | {"error": "no <head> & no file", "time_shares": None}
    text = page.page([rows[0], bad], [])
    assert "no &lt;head&gt; &amp; no file" in text


def test_a_head_has_one_colour_everywhere(rows: list[Record]) -> None:
    drawn = figures.draw_all(sweep(rows))
    assert len({light for light, _ in palette.COLOURS.values()}) == len(palette.COLOURS)
    for each in drawn:
        if each.name == "time_shares":  # its colours are those of the stages
            continue
        assert palette.colour("dspark") in each.svg
        assert "var(--dspark)" in each.inline and palette.colour("dspark") not in each.inline
    assert [each.name for each in series.of(sweep(rows))] == ["EAGLE-3", "DSpark"]


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium to open the page with")
def test_a_browser_has_nothing_to_complain_of(written: Path, tmp_path: Path) -> None:
    flags = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --virtual-time-budget=99"
    shot = tmp_path / "page.png"
    done = subprocess.run(
        ["chromium", *flags.split(), f"--screenshot={shot}", (written / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert shot.stat().st_size > 10_000
    assert not re.search("CONSOLE|net::ERR", done.stderr), done.stderr


def test_results_as_written_are_enough(written: Path, rows: list[Record]) -> None:
    """A page drawn from results.jsonl is the page drawn from the records."""
    records.append(sweep(rows), written)
    again = records.read(written)
    first = (written / "report.html").read_text()
    page.write(written, again)
    assert (written / "report.html").read_text() == first
