"""What must not change between a checkpoint and its resumption, as JSON values by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.core import hosts
from specjax.core.errors import TrainingError
from specjax.data import sources
from specjax.io.hf import resolve
from specjax.training.config import DataConfig, TrainerConfig
from specjax.training.partition import Leaves, digest

_EDGE = 1 << 16


def of_run(config: TrainerConfig, head: Any, frozen: Leaves) -> dict[str, Any]:
    """Return the fingerprint of a run: target, head, frozen weights, data and batches.

    The optimiser's values and the number of steps may change on purpose; they are not part of it.
    """
    data = config.data
    print_ = {
        "target": of_target(config.target),
        "data": of_files(data.paths),
        "batches": [list(data.buckets()), data.max_length, data.min_supervised, data.holdout],
        "shuffle": data.shuffle,
        **({"pack": True} if data.pack else {}),
        "rendering": rendering(data),
        "batch_size": config.batch_size,
        "accumulation": config.accumulation,
        "target_dtype": config.target_dtype,
        "compute_dtype": config.compute_dtype,
        "optimizer": config.optim.name,
        "seed": config.seed,
        **({"features": of_files([_manifest(config)])} if config.features else {}),
        **({"feature_noise": config.feature_noise} if config.feature_noise else {}),
        **({"ema": config.ema} if config.ema else {}),
        "head": getattr(head, "name", type(head).__name__),
        **{f"head.{name}": value for name, value in flatten(head).items()},
        **{f"frozen {name}": digest(leaf) for name, leaf in frozen.items()},
    }
    return json.loads(json.dumps(print_))  # tuples as JSON gives them back


def unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, value in one, value in the other) of every entry that differs."""
    names = sorted({*one, *other})
    return [(n, one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n)]


def refuse_strangers(here: Mapping[str, Any]) -> None:
    """Refuse a process whose run is not that of process 0, as with an old copy of the data.

    Raises:
        TrainingError: names every entry that differs with both values.
    """
    lead = json.loads(hosts.of_lead(json.dumps(here)))
    if found := unequal(lead, here):
        what = "; ".join(f"{name} is {ours!r}, there {its!r}" for name, its, ours in found)
        raise TrainingError(
            f"process {jax.process_index()} has another run than process 0: {what}; give all hosts"
            " the same settings and files"
        )


def of_target(path: str) -> str:
    """Return a digest of a target's configuration and of its weight files' sizes and ends.

    Whole files would cost minutes for large targets; a header and an end differ between any two
    trainings of one architecture in practice.
    """
    root = resolve(path)
    total = hashlib.sha256((root / "config.json").read_bytes())
    for file in sorted(root.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as handle:
            total.update(f"{file.name} {size} ".encode() + handle.read(_EDGE))
            handle.seek(max(size - _EDGE, 0))
            total.update(handle.read())
    return total.hexdigest()[:12]


def of_features(config: TrainerConfig) -> dict[str, Any]:
    """Return what the target's features of a run's rows depend on, which a cache must share."""
    data, root = config.data, resolve(config.target)
    names = ("tokenizer*", "*.jinja", "vocab*", "merges*", "special_tokens*", "added_tokens*")
    files = sorted({path for name in names for path in root.glob(name) if path.is_file()})
    tokenizer = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return {
        "target": of_target(config.target),
        "target_dtype": config.target_dtype,
        "tokenizer": tokenizer.hexdigest()[:12],
        "data": of_files(data.paths),
        "max_length": data.max_length,
        "min_supervised": data.min_supervised,
        "rendering": rendering(data),
    }


def _manifest(config: TrainerConfig) -> str:
    return str(Path(config.features).expanduser() / "features.json")


def of_files(paths: Iterable[str]) -> str:
    """Return a digest of what the data sources hold, in order.

    Raises:
        DataError: no such source.
    """
    return sources.digest(paths)


def rendering(data: DataConfig) -> list[Any] | None:
    """Return what tokens and masks depend on beside the files; None: the target's own template."""
    template = data.chat_template
    if template and Path(template).expanduser().is_file():
        template = of_files([template])
    given = [template, data.enable_thinking, data.supervise_thinking]
    return None if given == [None, None, True] else given


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return a frozen dataclass as dotted names and plain values; functions count by name."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        item = getattr(value, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(item):
            out.update(flatten(item, f"{name}."))
        else:
            out[name] = _plain(item)
    return out


def _plain(item: Any) -> Any:
    if isinstance(item, list | tuple):
        return [_plain(part) for part in item]
    if dataclasses.is_dataclass(item):
        return flatten(item)
    if item is None or isinstance(item, bool | int | float | str):
        return item
    return getattr(item, "__qualname__", str(item))
