"""Rebuild a report, or compare runs: `specjax report RUN [RUN ...]`.

usage: specjax report RUN [RUN ...] [--out PATH]

RUN is a results directory, or its results.jsonl. One is reported again: tables here, and
report.html, report.md and figures in it (or in the directory PATH). Of several, each is compared
with the first: what differs, and whether by more than the noise. --out then writes that as HTML.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specjax import cli
from specjax.core.errors import ConfigError, DataError


def main(argv: Sequence[str] | None = None) -> int:
    """Report or compare runs; see `specjax.cli.main` for the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        print((__doc__ or "").strip())
        return 0

    def run() -> int:
        _report(*_parsed(words))
        return 0

    return cli.guarded(run)


def _parsed(words: Sequence[str]) -> tuple[list[Path], Path | None]:
    out, runs, rest = None, [], iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag == "--out":
            value = value if equals else next(rest, "")
            if not value:
                raise ConfigError("--out names no path")
            out = Path(value).expanduser()
        elif word.startswith("-"):
            raise ConfigError(f"unknown flag {flag}; specjax report takes directories and --out")
        else:
            path = Path(word).expanduser()
            runs.append(path.parent if path.name == "results.jsonl" else path)
    if not runs:
        raise ConfigError("specjax report takes the directory of a run, or several to compare")
    return runs, out


def _report(runs: Sequence[Path], out: Path | None) -> None:
    from rich.console import Console

    from specjax.evaluation import compare, records, report
    from specjax.evaluation.html import compare_page, page

    console = Console()
    if not console.is_terminal:
        console.width = report.WIDTH
    each = [records.read(path) for path in runs]
    for path, rows in zip(runs, each, strict=True):
        if not rows:
            raise DataError(f"{path / records.RESULTS} holds no records that can be read")
    if len(runs) == 1:
        directory = out or runs[0]
        report.show(each[0], console)
        report.write(directory, each[0], page.write(directory, each[0]))
        console.print(f"Report: {directory / page.PAGE}", highlight=False, soft_wrap=True)
        return
    first = str(runs[0])
    found = [
        compare.compare(each[0], rows, (first, str(path)))
        for path, rows in zip(runs[1:], each[1:], strict=True)
    ]
    for comparison in found:
        compare.show(comparison, console)
        console.print()
    if out is not None:
        where = out if out.suffix == ".html" else out / compare_page.PAGE
        records.write_whole(where, compare_page.render(found))
        console.print(f"Comparison: {where}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
