"""The study of the five methods: every pair of configs/studies, in one table.

    python eval/five_methods.py --out runs/five_methods [--studies qwen3_8b] [Name.x=value]

Native MTP, Gemma 4 MTP, EAGLE-3, DFlash and DSpark on the targets they were released for, on four
benchmarks, at growing numbers of speculative tokens. Each study is a sweep in a folder of its own
under --out; the same command goes on where it stopped. A study that cannot run is named, and the
others go on. Settings hold for all of them: Eval.num_prompts=8, --prompts FILE.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax import eval as door
from specjax.cli import guarded
from specjax.core.errors import ConfigError, nearest
from specjax.core.paths import configs_dir


def studies() -> list[str]:
    """The names of the shipped studies."""
    files = sorted((configs_dir() / "studies").glob("*.gin"))
    return [file.stem for file in files if file.stem != "common"]


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every target, head and prompt set the record with the highest speedup."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        if row["error"] or row["head"] == "none":
            continue
        pair = row["target"], row["head"], row["prompts_source"]
        if pair not in found or row["speedup"] > found[pair]["speedup"]:
            found[pair] = row
    return list(found.values())


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    from specjax.evaluation.report import WIDTH, number

    grid = Table(box=None, pad_edge=False)
    columns = ("target", "head", "prompts", "best width", "accept. length", "tok/s", "speedup")
    for i, name in enumerate((*columns, "spread", "identical")):
        grid.add_column(name, justify="left" if i < 3 else "right", overflow="fold")
    for row in best(rows):
        same = "sampled" if row["identical"] is None else f"{row['identical']}/{row['prompts']}"
        grid.add_row(
            row["target"],
            row["head"],
            Path(row["prompts_source"]).stem,
            str(row["num_speculative_tokens"]),
            number(row["mean_acceptance_length"]),
            number(row["output_tokens_per_second"], ",.1f"),
            number(row["speedup"]),
            f"{number(row['speedup_low'])}-{number(row['speedup_high'])}",
            same,
        )
    Console(width=WIDTH, markup=False, highlight=False).print(grid)


def run(names: list[str], out: Path, settings: list[str]) -> int:
    """Run studies one after the other; returns the exit code of the worst."""
    for name in names:
        if name not in studies():
            raise ConfigError(f"no study {name!r}{nearest(name, studies())}")
    worst, rows = 0, []
    for name in names:
        print(f"\n{name}")
        words = [f"--gin_file=studies/{name}.gin", f"--out={out / name}", *settings]
        code = door.main(words)
        if code == 130:
            return code
        worst = max(worst, code)
        if (out / name / "results.jsonl").exists():
            from specjax.evaluation import records

            rows += records.read(out / name)
    show(rows)
    return worst


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/five_methods"))
    parser.add_argument("--studies", default=",".join(studies()), help="names, commas between")
    args, settings = parser.parse_known_args(argv)
    return guarded(lambda: run(args.studies.split(","), args.out, settings))


if __name__ == "__main__":
    sys.exit(main())
