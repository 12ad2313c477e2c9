"""List the released draft heads, or say what one head is: `specjax heads`.

usage: specjax heads [NAME | DIR [TARGET]]

Without a word it lists the catalogue (configs/heads/), and the MTP modules inside targets. NAME is
one of its names, DIR a head's directory, with or without its weights. A head is tried on every
target of the catalogue; TARGET, a name or a directory, is the one to try instead. No weight is
read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specjax import cli
from specjax.core.errors import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from specjax.heads.describe import HeadRecord

_WIDTH = 100
# Drafters without a release: what they are, and what fits them.
_PLAIN = {
    "ngram": "prompt lookup: what followed the last time the text said the same; no weights",
    "small_model": "small_model:DIR, another model with the target's vocabulary",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Show heads; see `specjax.cli.main` for the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        print((__doc__ or "").strip())
        return 0

    def run() -> int:
        if flags := [word for word in words if word.startswith("-")]:
            raise ConfigError(f"unknown flag {flags[0]}; specjax heads takes a head and a target")
        if len(words) > 2:
            raise ConfigError(f"specjax heads takes a head and a target, not {len(words)} words")
        _show(*words) if words else _list()
        return 0

    return cli.guarded(run)


def _list() -> None:
    """Print a line per head of the catalogue, under the target that it was made for."""
    from rich.table import Table

    from specjax.heads import catalog, describe
    from specjax.targets import catalog as targets

    infos = {name: targets.read(name).build().info for name in targets.names()}
    grid = Table(box=None, pad_edge=False)
    grid.add_column("target\n  head", no_wrap=True)
    grid.add_column("algorithm", no_wrap=True)
    grid.add_column("layers", justify="right", no_wrap=True)
    grid.add_column("drafts per\nround", justify="right", no_wrap=True)
    grid.add_column("billions\nown / stored", justify="right", no_wrap=True)
    grid.add_column("draft\nvocabulary", justify="right", no_wrap=True)
    entries = [catalog.read(name) for name in (*catalog.names(), *catalog.modules())]
    for target, info in infos.items():
        made = [entry for entry in entries if target in entry.targets]
        if made:
            grid.add_row(target)
        for entry in made:
            record = describe.describe(entry, {target: info})
            grid.add_row(
                f"  {entry.name}" + ("*" if record.unverified else ""),
                describe.TITLES[record.algorithm],
                str(record.num_layers),
                _drafts(record),
                f"{record.trained / 1e9:.3f} / {record.stored / 1e9:.3f}",
                f"{record.draft_vocab:,}",
            )
    console = _console()
    console.print(grid)
    console.print("\nFor any target, without a release:")
    for name, what in _PLAIN.items():
        console.print(f"  {name:<13}{what}")
    console.print(
        "\nOwn parameters are those that training changes; a checkpoint may store copies of the"
        " target's\nembedding and output layer besides. Drafts per round: as its publisher uses"
        " it, or the most it has."
        "\n* some facts are not verified: specjax heads NAME lists them."
    )


def _show(word: str, target: str | None = None) -> None:
    """Print what one head is."""
    from rich.table import Table

    from specjax.heads import catalog, describe

    console = _console()
    if word.partition(":")[0] in _PLAIN:
        console.print(f"{word}: {_PLAIN[word.partition(':')[0]]}")
        return
    if Path(word).expanduser().is_dir():
        record = describe.describe_directory(word, target)
    elif word in (known := (*catalog.names(), *catalog.modules())):
        record = describe.describe_entry(catalog.read(word), target)
    else:
        raise CheckpointError(
            f"no head {word!r}: neither a directory nor in the catalogue"
            f"{nearest(word, (*known, *_PLAIN))} (specjax heads lists it)"
        )
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    before = ""
    for title, text in _rows(record, describe.TITLES[record.algorithm]):
        grid.add_row("" if title == before else title, text)
        before = title
    console.print(f"{record.name}\n")
    console.print(grid)


def _rows(record: HeadRecord, title: str) -> list[tuple[str, str]]:
    """Return (what, value) of a record, in the order of the table."""
    cost = record.cost
    rows = [
        ("algorithm", title),
        ("made for", ", ".join(record.targets)),
        ("fits", ", ".join(record.fits)),
        ("layers", record.layers),
        ("taps", _taps(record)),
        ("reads", _reads(record)),
        ("block", _block(record)),
        ("drafts per round", _drafts(record)),
        ("confidences", "of its own" if record.confidence else "none"),
        ("draft vocabulary", f"{record.draft_vocab:,} of {record.vocab:,} tokens"),
        ("parameters", f"{record.trained:,} its own, {record.stored:,} stored"),
        ("published", _published(record)),
        (
            "longest context",
            f"{record.max_context:,} tokens" if record.max_context else "not stated",
        ),
        (
            "cost per round",
            f"{cost.drafts} drafts in {cost.passes} {'passes' if cost.passes > 1 else 'pass'}:"
            f" {cost.multiply_adds / 1e9:,.3f} billion multiply-adds with weights, and"
            f" {cost.weight_bytes / 1e9:,.3f} GB of these read, for one row in bfloat16",
        ),
        (
            "state",
            f"{cost.state_per_token:,} bytes per token, {cost.state_fixed:,} bytes per row"
            " that do not grow, in bfloat16",
        ),
        *(("does not fit", f"{', '.join(names)}: {why}") for why, names in record.refused),
        ("source", record.source),
        *(("not verified", fact) for fact in record.unverified),
    ]
    return [row for row in rows if row[1]]


def _taps(record: HeadRecord) -> str:
    """The tapped layers, as inputs of layers and as outputs: the two spellings in use."""
    if not record.taps:
        return ""
    streams = ", ".join(map(str, record.taps))
    outputs = ", ".join("embedding" if tap == 0 else str(tap - 1) for tap in record.taps)
    return (
        f"residual streams {streams} (speculators and vLLM write these), the outputs of layers"
        f" {outputs} (DeepSpec and z-lab write these)"
    )


def _reads(record: HeadRecord) -> str:
    if not record.reads:
        return ""
    return f"keys and values of the target's layers {', '.join(map(str, record.reads))}"


def _block(record: HeadRecord) -> str:
    if record.block is None:
        return ""
    slots, mask = record.block
    return f"{slots} slots, the anchor's among them; mask token {mask}"


def _drafts(record: HeadRecord) -> str:
    """The drafts that the publisher uses; of a head without a figure, the most it has."""
    return str(record.drafts or record.most or "any")


def _published(record: HeadRecord) -> str:
    """What is known of the release's size."""
    known, parts = record.published, []
    if known.billions is not None:
        parts.append(f"{known.billions:g} billion parameters")
    if known.bytes is not None:
        parts.append(f"{known.bytes:,} bytes")
    if known.gib is not None:
        parts.append(f"{known.gib:g} GiB")
    sizes = ", ".join(parts)
    return ". ".join(part for part in (sizes, known.note) if part)


def _console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, width=_WIDTH)


if __name__ == "__main__":
    sys.exit(main())
