"""Heads stored without the rows that are their target's, and how they get them back.

Embedding and output layer are most of a head's file, and in most heads they are the target's own
rows. A file may leave them out and say so in its `config.json`: which rows, of which target, and a
digest of that target's tables. Loading takes them from the target at hand, if the digest is right.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core.errors import CheckpointError, PairingError
from specjax.heads.base import Borrowed
from specjax.heads.vocabulary import kept_ids
from specjax.io.hf import TensorReader, load_params, read_config

Weights = Any
Shapes = Mapping[str, tuple[int, ...]]

FIELD = "specjax_paired"
"""Our own word in `config.json`; other readers skip it."""
ROWS = ("embedding", "output")
_SAMPLE = 1024  # rows per table that the digest sees


def digest(borrowed: Borrowed) -> str:
    """Return a digest of a target's tables, the same in float32 and bfloat16.

    It sees at most 1,024 rows of each, evenly spread, rounded to bfloat16: models that differ
    anywhere in training differ there, and a table spread over many devices need not be gathered.
    """
    total = hashlib.sha256()
    for table in (borrowed.embedding, borrowed.output):
        size = table.shape[0]
        rows = np.unique(np.linspace(0, size - 1, min(size, _SAMPLE)).astype(np.int32))
        seen = np.asarray(jax.device_get(table[jnp.asarray(rows)].astype(jnp.bfloat16)))
        total.update(f"{table.shape} ".encode() + seen.tobytes())
    return total.hexdigest()[:16]


def lent_rows(params: Weights, borrowed: Borrowed) -> tuple[str, ...]:
    """Return which of a head's tables are the target's rows bit for bit, in the head's dtype.

    Args:
        params: weights with the fields `embedding`, `output` and `d2t`.
        borrowed: the target's tables.
    """
    found = []
    kept = kept_ids(params)
    for name, theirs in (("embedding", borrowed.embedding), ("output", borrowed.output)):
        own = getattr(params, name)
        if own is None:
            continue
        if name == "output" and kept is not None:
            theirs = theirs[kept]
        if own.shape == theirs.shape and bool(jnp.array_equal(own, theirs.astype(own.dtype))):
            found.append(name)
    return tuple(found)


def fields(rows: tuple[str, ...], borrowed: Borrowed, target: str) -> dict[str, Any]:
    """Return what `config.json` says of a head that takes `rows` from a target."""
    return {FIELD: {"target": target, "rows": list(rows), "sha256": digest(borrowed)}}


def read(config: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """Return what a `config.json` says of rows left out, None if nothing.

    Raises:
        CheckpointError: it says it in other words than ours.
    """
    said = config.get(FIELD)
    if said is None:
        return None
    rows = said.get("rows") if isinstance(said, Mapping) else None
    if not isinstance(rows, list) or not set(rows) <= set(ROWS) or "sha256" not in said:
        raise CheckpointError(
            f"{where}: {FIELD} must have sha256, target and rows, some of {', '.join(ROWS)}"
        )
    return said


def with_lent(config: Mapping[str, Any], shapes: Shapes, where: str) -> Shapes:
    """Return the shapes of stored tensors and of those that loading will fill in.

    Only the rows of a draft vocabulary are filled in; whole tables are borrowed as they are.
    """
    said = read(config, where)
    if said is None or "output" not in said["rows"] or "d2t" not in shapes:
        return shapes
    # All layouts that have draft vocabularies call it so, next to a norm of the head's width.
    return {**shapes, "lm_head.weight": (shapes["d2t"][0], shapes["norm.weight"][0])}


def check(config: Mapping[str, Any], borrowed: Borrowed | None, where: str) -> None:
    """Refuse a target whose rows are not those that a head was stored without.

    Raises:
        PairingError: naming both.
    """
    said = read(config, where)
    if said is None or borrowed is None:
        return
    if (found := digest(borrowed)) != said["sha256"]:
        raise PairingError(
            f"{where} takes its {' and '.join(said['rows'])} rows from {said.get('target')}"
            f" (digest {said['sha256']}); this target's are others (digest {found})"
        )


def load(
    specs: Weights,
    reader: TensorReader,
    config: Mapping[str, Any],
    dtype: str,
    shardings: Any | None,
    borrowed: Borrowed | None,
) -> Weights:
    """Load a head's weights; a draft vocabulary's rows that were left out are the target's.

    Args:
        specs: the head's weight table.
        reader: of its tensors.
        config: its `config.json`.
        dtype: dtype in memory.
        shardings: as in `io.hf.load_params`.
        borrowed: the target's tables; None where they are not at hand.

    Raises:
        PairingError: they are another target's, or needed and not given.
    """
    where = str(reader.path)
    check(config, borrowed, where)
    said = read(config, where)
    if said is None or "output" not in said["rows"] or specs.output is None:
        return load_params(specs, reader, dtype, shardings)
    if borrowed is None:
        raise PairingError(
            f"{where} is stored without its output rows, which are {said.get('target')}'s: load it"
            " together with that target (borrowed=borrow(target, params))"
        )
    if callable(shardings):
        shardings = shardings(specs)
    of_output, rest = shardings, shardings
    if shardings is not None and not isinstance(shardings, jax.sharding.Sharding):
        of_output, rest = shardings.output, dataclasses.replace(shardings, output=None)
    params = load_params(dataclasses.replace(specs, output=None), reader, dtype, rest)
    output = borrowed.output[kept_ids(params)].astype(dtype)
    if of_output is not None:
        output = jax.device_put(output, of_output)
    return dataclasses.replace(params, output=output)


def note(path: str | Path) -> str:
    """Return a sentence about the rows that a head takes from its target, "" if it takes none."""
    said = read(read_config(path), str(path))
    if said is None or not said["rows"]:
        return ""
    return f"The head's {' and '.join(said['rows'])} rows are the target's (digest checked)."
