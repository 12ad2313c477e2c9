"""List the production targets, or say what one target is: `specjax targets`.

usage: specjax targets [NAME | DIR]

Without a word it lists the catalogue (configs/targets/). NAME is one of its names, DIR a checkpoint
directory, with or without its weights. No weight is read.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specjax import cli
from specjax.core.errors import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from specjax.targets.describe import TargetRecord

_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Show targets; see `specjax.cli.main` for the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        print((__doc__ or "").strip())
        return 0

    def run() -> int:
        if flags := [word for word in words if word.startswith("-")]:
            raise ConfigError(f"unknown flag {flags[0]}; specjax targets takes a name or directory")
        if len(words) > 1:
            raise ConfigError(f"specjax targets takes one name or directory, not {len(words)}")
        _show(words[0]) if words else _list()
        return 0

    return cli.guarded(run)


def _list() -> None:
    """Print a line per target of the catalogue."""
    from rich.table import Table

    from specjax.targets import catalog, describe

    grid = Table(box=None, pad_edge=False)
    grid.add_column("target", no_wrap=True)
    grid.add_column("family", no_wrap=True)
    grid.add_column("layers by kind", overflow="fold", ratio=1)
    grid.add_column("billions\n(active)", justify="right", no_wrap=True)
    grid.add_column("cache per\ntoken, KiB", justify="right", no_wrap=True)
    for name in catalog.names():
        record = describe.describe_entry(catalog.read(name))
        grid.add_row(
            name + ("*" if record.unverified else ""),
            record.family,
            _layers(record),
            _billions(record),
            f"{record.cache_per_token / 1024:.1f}",
        )
    console = _console()
    console.print(grid)
    console.print(
        "\nParameters of the text model; the cache in bfloat16, its part that grows."
        "\n* some facts are not verified: specjax targets NAME lists them."
    )


def _show(word: str) -> None:
    """Print what one target is."""
    from rich.table import Table

    from specjax.targets import catalog, describe

    if Path(word).expanduser().is_dir():
        record = describe.describe_directory(word)
    elif word in (known := catalog.names()):
        record = describe.describe_entry(catalog.read(word))
    else:
        raise CheckpointError(
            f"no target {word!r}: neither a directory nor in the catalogue{nearest(word, known)}"
            " (specjax targets lists it)"
        )
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for title, text in _rows(record):
        grid.add_row(title, text)
    console = _console()
    console.print(f"{record.name}\n")
    console.print(grid)


def _rows(record: TargetRecord) -> list[tuple[str, str]]:
    """Return (what, value) of a record, in the order of the table."""
    last = record.num_layers
    longest = record.cache_per_token * record.max_context + record.cache_fixed
    rows = [
        ("family", record.family),
        ("layers", f"{last}: {_layers(record)}" if len(record.layers) > 1 else _layers(record)),
        *(
            ("experts", f"{group.used} of {group.of} per token, in {group.layers} layers")
            for group in record.experts
        ),
        ("hidden size", f"{record.hidden:,}"),
        ("vocabulary", f"{record.vocab:,}"),
        ("parameters", _parameters(record)),
        ("published", _published(record)),
        ("growing cache", f"{record.cache_per_token:,} bytes per token, in bfloat16"),
        ("fixed cache", f"{record.cache_fixed:,} bytes per row: rings and states"),
        ("longest context", f"{record.max_context:,} tokens, {longest / 2**30:,.2f} GiB per row"),
        ("storage", record.storage),
        ("unquantised", ", ".join(record.unquantised)),
        ("stop ids", ", ".join(map(str, record.stop_ids)) or "none"),
        (
            "taps",
            f"0 to {last}: 0 is the embedding output, i the residual stream after i layers, {last} "
            "the one before the final norm",
        ),
        *_drafters(record),
        ("skipped tensors", _skipped(record)),
        ("source", record.source),
        *(("not verified", fact) for fact in record.unverified),
    ]
    return [row for row in rows if row[1]]


def _drafters(record: TargetRecord) -> list[tuple[str, str]]:
    """Return rows of the drafters that can be used, that are to come, and that do not fit."""
    fitting = [drafter for drafter in record.drafters if drafter.fits]
    built = [d.title for d in fitting if is_built(d.name)]
    coming = [d.title for d in fitting if not is_built(d.name)]
    unfit = [f"{d.title} ({d.why})" for d in record.drafters if not d.fits]
    return [
        ("drafters", ", ".join(built)),
        ("not built yet", ", ".join(coming)),
        ("do not fit", ", ".join(unfit)),
    ]


def is_built(name: str) -> bool:
    """Whether a head exists, by its name in records. DSpark shares DFlash's module."""
    module = "dflash" if name == "dspark" else name
    return importlib.util.find_spec(f"specjax.heads.{module}") is not None


def _layers(record: TargetRecord) -> str:
    return ", ".join(str(group) for group in record.layers)


def _billions(record: TargetRecord) -> str:
    """The parameters, and the active ones where these are fewer."""
    active = f" ({record.active / 1e9:.3f})" if record.active != record.parameters else ""
    return f"{record.parameters / 1e9:.3f}{active}"


def _parameters(record: TargetRecord) -> str:
    active = f" ({record.active:,} active)" if record.active != record.parameters else ""
    return f"{record.parameters:,}{active}, text model"


def _published(record: TargetRecord) -> str:
    """The publisher's size, how far the counts are from it, and why."""
    if (published := record.published) is None:
        return ""
    pairs = [
        (named, counted, word)
        for named, counted, word in (
            (published.total_billions, record.parameters, ""),
            (published.active_billions, record.active, " active"),
        )
        if named is not None
    ]
    sizes = ", ".join(
        f"{named:g}{word} (counted {counted / 1e9:.3f}, {counted / 1e9 / named - 1:+.1%})"
        for named, counted, word in pairs
    )
    return f"{sizes} billion. {published.note}".strip()


def _skipped(record: TargetRecord) -> str:
    """What a load passes over; nothing to say of the catalogue, which has no weights."""
    if record.published:
        return ""
    if record.skipped is None:
        return "unknown, no weights here"
    return ", ".join(f"{what} ({number})" for what, number in record.skipped) or "none"


def _console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, width=_WIDTH)


if __name__ == "__main__":
    sys.exit(main())
