"""The released draft heads whose published configurations ship with us (`configs/heads/*.json`).

A file is a `config.json` as published and a section `specjax`: where its facts are from, the target
it was made for, the drafts per round its publisher uses, which tensors the checkpoint stores beyond
what the configuration tells, what size is known of it, and what is not verified. MTP modules that
lie in a target's own checkpoint need no file: they are listed as `TARGET:mtp`. Nothing heavy is
imported before a head is built.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specjax.core import paths
from specjax.core.errors import CheckpointError, nearest
from specjax.heads import RELEASED
from specjax.targets import catalog as targets

if TYPE_CHECKING:
    from specjax.targets.base import TargetInfo

_SECTION = "specjax"
_MODULES = ":mtp"
_KEYS = ("source", "targets", "drafts", "published", "stores", "unverified")


@dataclasses.dataclass(frozen=True)
class Published:
    """What is known of a release's size.

    Attributes:
        billions: parameters, as the publisher names them.
        bytes: size of the weights' file.
        gib: the same, rounded, where no more is known.
        note: what the figures mean, or which release this is.
    """

    billions: float | None = None
    bytes: int | None = None
    gib: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class HeadEntry:
    """A released head.

    Attributes:
        name: as published, without its owner; of MTP modules `TARGET:mtp`.
        config: its `config.json`; of MTP modules the target's.
        source: where the facts are from.
        targets: targets of the catalogue that it was made for.
        drafts: drafts per round that its publisher uses, None where none are named.
        published: what is known of its size.
        stores: shapes of stored tensors that the configuration does not tell of.
        unverified: facts that were not seen in a copy of the release, each "field: why".
    """

    name: str
    config: Mapping[str, Any]
    source: str
    targets: tuple[str, ...]
    drafts: int | None
    published: Published
    stores: Mapping[str, tuple[int, ...]]
    unverified: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The package under `specjax.heads` that reads it.

        Raises:
            CheckpointError: none does.
        """
        return kind_of(self.config, self.name)

    def build(self, info: TargetInfo) -> Any:
        """Return the head for a target, without weights.

        Raises:
            PairingError: it does not belong to this target.
            CheckpointError: a malformed configuration, or one that is not supported.
        """
        return layouts(self.kind).read_head(self.config, self.stores, info, self.name)


def names() -> tuple[str, ...]:
    """Return the names of the catalogue's files, sorted."""
    folder = paths.configs_dir() / "heads"
    return tuple(sorted((file.stem for file in folder.glob("*.json")), key=str.lower))


def modules() -> tuple[str, ...]:
    """Return the names of the MTP modules that targets of the catalogue carry."""
    return tuple(
        name + _MODULES for name in targets.names() if targets.read(name).build().info.draft_modules
    )


def read(name: str) -> HeadEntry:
    """Return the catalogue's entry of that name.

    Raises:
        CheckpointError: there is none (the nearest is named), or its file is malformed.
    """
    from specjax.io.hf import read_json

    if name.endswith(_MODULES) and name in modules():
        return _read_modules(name, targets.read(name.removesuffix(_MODULES)))
    if name not in (known := names()):
        raise CheckpointError(
            f"no head {name!r} in the catalogue{nearest(name, known)} (specjax heads lists it)"
        )
    file = paths.configs_dir() / "heads" / f"{name}.json"
    config = read_json(file)
    section = config.pop(_SECTION, {})
    if missing := [key for key in _KEYS if key not in section]:
        raise CheckpointError(f"{file}: its section {_SECTION!r} lacks {', '.join(missing)}")
    return HeadEntry(
        name=name,
        config=config,
        source=section["source"],
        targets=tuple(section["targets"]),
        drafts=section["drafts"],
        published=Published(**section["published"]),
        stores={tensor: tuple(shape) for tensor, shape in section["stores"].items()},
        unverified=tuple(section["unverified"]),
    )


def kind_of(config: Mapping[str, Any], where: str) -> str:
    """Tell from a `config.json` which package under `specjax.heads` reads it.

    Raises:
        CheckpointError: none does.
    """
    for kind in RELEASED:
        if layouts(kind).recognises(config):
            return kind
    raise CheckpointError(
        f"{where}: architectures {config.get('architectures')} is no draft head; have"
        f" {', '.join(RELEASED)}"
    )


def layouts(kind: str) -> Any:
    """Return the module that reads and writes the released layouts of a kind of head."""
    return importlib.import_module(f"specjax.heads.{kind}.layouts")


def _read_modules(name: str, target: targets.CatalogEntry) -> HeadEntry:
    """Return the entry of the MTP modules in a target's checkpoint."""
    return HeadEntry(
        name=name,
        config=target.config,
        source=target.source,
        targets=(target.name,),
        drafts=None,
        published=Published(),
        stores={},
        unverified=target.unverified,
    )
