"""The production targets whose published configurations ship with us (`configs/targets/*.json`).

A file is a `config.json` as published, without the towers of a multimodal wrapper, and a section
`specjax` that says where its facts are from, which of them are not verified, and what size the
publisher names. Nothing heavy is imported before a target is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specjax.core import paths
from specjax.core.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from specjax.targets.base import Target
    from specjax.targets.config import TargetConfig

_SECTION = "specjax"


@dataclasses.dataclass(frozen=True)
class Published:
    """The size that the publisher names.

    Attributes:
        total_billions: parameters.
        active_billions: parameters that a token uses, None where none are named.
        note: why a count differs from it.
    """

    total_billions: float
    active_billions: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class CatalogEntry:
    """A production target.

    Attributes:
        name: as published, without its owner.
        config: its `config.json`.
        source: where the facts are from.
        published: the size that the publisher names.
        stop_ids: tokens that end a text; those of its generation configuration where it is known.
        unverified: facts that were not seen in a copy of the release, each "field: why".
    """

    name: str
    config: Mapping[str, Any]
    source: str
    published: Published
    stop_ids: tuple[int, ...]
    unverified: tuple[str, ...] = ()

    def build(self, how: TargetConfig | None = None) -> Target:
        """Return the target, without weights."""
        from specjax.targets.loading import from_config, text_config

        config = {**text_config(self.config), "eos_token_id": list(self.stop_ids)}
        return from_config(config, how)


def names() -> tuple[str, ...]:
    """Return the names of the catalogue, sorted."""
    folder = paths.configs_dir() / "targets"
    return tuple(sorted((file.stem for file in folder.glob("*.json")), key=str.lower))


def read(name: str) -> CatalogEntry:
    """Return the catalogue's entry of that name.

    Raises:
        CheckpointError: there is none (the nearest is named), or its file is malformed.
    """
    from specjax.io.hf import read_json

    if name not in (known := names()):
        raise CheckpointError(
            f"no target {name!r} in the catalogue{nearest(name, known)} (it has {', '.join(known)})"
        )
    file = paths.configs_dir() / "targets" / f"{name}.json"
    config = read_json(file)
    section = config.pop(_SECTION, {})
    if missing := [key for key in ("source", "published", "unverified") if key not in section]:
        raise CheckpointError(f"{file}: its section {_SECTION!r} lacks {', '.join(missing)}")
    return CatalogEntry(
        name=name,
        config=config,
        source=section["source"],
        published=Published(**section["published"]),
        stop_ids=_stop_ids(section.get("generation", {}), config, config.get("text_config", {})),
        unverified=tuple(section["unverified"]),
    )


def _stop_ids(*places: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the stop ids of the first place that has any, sorted."""
    for place in places:
        stops = place.get("eos_token_id")
        if stops is not None:
            return (stops,) if isinstance(stops, int) else tuple(sorted(stops))
    return ()
