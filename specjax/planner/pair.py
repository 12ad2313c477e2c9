"""The target and the head that a plan is about, without weights, and one round of theirs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from specjax.core.errors import CheckpointError, PairingError, nearest
from specjax.core.mesh_config import AXES, MeshConfig
from specjax.core.params import shapes
from specjax.core.sharding import SERVED, Layout
from specjax.decode.placement import shardings
from specjax.decode.round import Decoder, Weights, init_state, one_round
from specjax.heads import catalog as heads
from specjax.heads.base import NullHead
from specjax.heads.describe import directory_entry
from specjax.heads.ngram import NgramHead
from specjax.io.hf import read_config, resolve
from specjax.planner.cost import Cost
from specjax.planner.program import flatten
from specjax.planner.spread import Spread, ways
from specjax.planner.storage import stored_specs
from specjax.planner.walk import walk
from specjax.targets import catalog as targets
from specjax.targets.base import Target
from specjax.targets.config import TargetConfig
from specjax.targets.loading import from_config

PyTree = Any
_PLAIN = ("ngram",)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target, a head, and how they are held.

    Attributes:
        target_name: as the catalogue or the directory calls it.
        head_name: likewise.
        target: the target.
        head: the head.
        target_specs: its weights as they are stored.
        head_specs: the head's.
        drafts: drafts per round that the head's publisher uses, None if not named.
    """

    target_name: str
    head_name: str
    target: Target
    head: Any
    target_specs: PyTree
    head_specs: PyTree
    drafts: int | None = None


def find_pair(target: str, head: str, how: TargetConfig) -> Pair:
    """Return the pair that a user names.

    Args:
        target: name of the catalogue in any case, or directory.
        head: name, algorithm, "ngram", or directory.
        how: how the target is held. Its layers are scanned unless it says otherwise: what a round
            costs is the same, and a deep program is traced in a fraction of the time.

    Raises:
        CheckpointError: nothing of that name.
        PairingError: the head does not belong to the target.
    """
    if how.layer_loop == "auto":
        how = dataclasses.replace(how, layer_loop="scan")
    directory: Path | None = None
    config: Mapping[str, Any]
    if Path(target).expanduser().is_dir():
        directory = resolve(target)
        name, config = directory.name, read_config(directory)
        built = from_config(config, how)
    else:
        entry = targets.read(_name(target, targets.names(), "target"))
        name, config, built = entry.name, entry.config, entry.build(how)
    specs = built.specs()
    if how.weights == "packed":
        specs = stored_specs(specs, config, directory)
    head_name, drafter, drafts = _head(head, name, built)
    return Pair(name, head_name, built, drafter, specs, drafter.specs(), drafts)


def _name(word: str, known: Sequence[str], what: str) -> str:
    """Return the name of a catalogue that a word means."""
    found = {name.lower(): name for name in known}
    if word.lower() not in found:
        raise CheckpointError(
            f"no {what} {word!r}: neither a directory nor in the catalogue"
            f"{nearest(word.lower(), known)} (specjax {what}s lists it)"
        )
    return found[word.lower()]


def _head(word: str, target: str, built: Target) -> tuple[str, Any, int | None]:
    if word in _PLAIN:
        return word, NgramHead(), None
    if Path(word).expanduser().is_dir():
        entry = directory_entry(word)
    elif word.lower() in ("eagle3", "dflash", "dspark", "mtp", "gemma4_mtp"):
        entry = _of_kind(word.lower(), target, built)
    else:
        known = (*heads.names(), *heads.modules())
        entry = heads.read(_name(word, known, "head"))
    return entry.name, entry.build(built.info), entry.drafts


def _of_kind(kind: str, target: str, built: Target) -> heads.HeadEntry:
    """Return the catalogue's first head of an algorithm for a target."""
    made = [entry for entry in map(heads.read, heads.names()) if target in entry.targets]
    if built.info.draft_modules and f"{target}:mtp" in heads.modules():
        made.append(heads.read(f"{target}:mtp"))
    for entry in made:
        if entry.build(built.info).name == kind:
            return entry
    have = ", ".join(entry.name for entry in made) or "none"
    raise PairingError(
        f"the catalogue has no {kind} head for {target} (it has {have}); name one, or a directory"
    )


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    Attributes:
        target: weights of the target.
        head: weights of the head.
        state: caches and all else that a round carries on.
    """

    target: float
    head: float
    state: float


def layout_of(mesh: MeshConfig) -> Layout | None:
    """Return how the engine lays weights and states on a mesh that need not exist."""
    if mesh.devices == 1:
        return None
    sizes = tuple(getattr(mesh, axis) for axis in AXES)
    abstract: Any = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Layout.of(mesh, SERVED, abstract)


def trace_round(
    pair: Pair,
    drafts: int,
    batch: int,
    context: int,
    *,
    dtype: str,
    cache_dtype: str,
    platform: str,
    layout: Layout | None = None,
) -> tuple[Cost, Memory]:
    """Trace one round of the engine on shapes, and count it.

    Args:
        pair: what decodes.
        drafts: per lane (K); 0 runs without the head.
        batch: lanes (B).
        context: tokens that each lane has room for.
        dtype: of weights that fix none.
        cache_dtype: of caches.
        platform: see `Chip.platform`.
        layout: where weights and states lie; None on one device.

    Returns:
        (cost of the round, memory besides its temporaries), of one device.

    Raises:
        ConfigError: lanes, heads or experts that do not divide over the mesh.
    """
    head = pair.head if drafts else NullHead()
    specs = Weights(target=pair.target_specs, head=pair.head_specs if drafts else ())
    decoder = Decoder(pair.target, head, drafts, pair.target.info.stop_ids)
    weights = shapes(specs, dtype)
    state = jax.eval_shape(lambda: init_state(decoder, batch, context, cache_dtype))

    traced = jax.make_jaxpr(functools.partial(one_round, decoder))(weights, state)
    if layout is None:
        laid: PyTree = jax.tree.map(lambda x: Spread((frozenset(),) * x.ndim), (weights, state))
        sizes: dict[str, int] = {}
    else:
        layout.check_rows(batch, "Plan.batches:")
        places = (layout.weights(specs), shardings(layout, state, batch))
        sizes = dict(layout.mesh.shape)
        laid = jax.tree.map(_spread, (weights, state), places)
    on_weights, on_state = laid
    flat = jax.tree.leaves(laid, is_leaf=lambda x: isinstance(x, Spread))
    # All rows are greedy: what sampling would cost is not counted. Its memory is, for the program
    # that is compiled can do both.
    cost = walk(flatten(traced, platform, _greedy(weights, state)), flat, sizes)
    either = walk(flatten(traced, platform), flat, sizes)
    return dataclasses.replace(cost, temporaries=either.temporaries), Memory(
        _bytes(weights.target, on_weights.target, sizes),
        _bytes(weights.head, on_weights.head, sizes),
        _bytes(state, on_state, sizes),
    )


def _greedy(weights: Weights, state: Any) -> dict[int, np.ndarray]:
    """Return the inputs of a round, by their number, that say that no row samples."""
    before = len(jax.tree.leaves(weights))
    named, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        before + number: np.zeros(leaf.shape, leaf.dtype)
        for number, (path, leaf) in enumerate(named)
        if jax.tree_util.keystr(path) == ".sampling.temperature"
    }


def _spread(leaf: jax.ShapeDtypeStruct, place: NamedSharding) -> Spread:
    dims = [frozenset([part] if isinstance(part, str) else part or ()) for part in place.spec]
    return Spread((*dims, *(frozenset() for _ in range(leaf.ndim - len(dims)))))


def _bytes(tree: PyTree, laid: PyTree, sizes: dict[str, int]) -> float:
    spreads = jax.tree.leaves(laid, is_leaf=lambda x: isinstance(x, Spread))
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize / ways(sizes, spread.axes)
        for leaf, spread in zip(jax.tree.leaves(tree), spreads, strict=True)
    )
