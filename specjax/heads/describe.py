"""What a draft head is, as a record: its layers, taps, sizes, the targets it fits, and its cost.

Everything is computed from the head's description and its weight table; no weight is read.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.core.errors import PairingError
from specjax.core.params import ParamSpec, leaves_with_names
from specjax.heads import pairing
from specjax.heads.catalog import HeadEntry, Published
from specjax.io.hf import TensorReader, read_config, resolve
from specjax.targets import catalog as targets
from specjax.targets.base import TargetInfo
from specjax.targets.describe import routers
from specjax.targets.loading import from_config, text_config

TITLES = {
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "mtp": "Native MTP",
    "gemma4_mtp": "Gemma 4 MTP",
}
_DRAFTS = 3  # where neither the publisher nor the head says how many
_CAPACITIES = (1 << 18, 1 << 19)  # beyond any window
_BYTES = 2  # of a bfloat16 number


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one row's round costs in the head, and what its state takes, in bfloat16.

    A round drafts, and takes in one committed token. Attention over the context is left out.

    Attributes:
        drafts: tokens that are drafted.
        passes: times that the layers run one after another.
        multiply_adds: in products with weights.
        weight_bytes: weights that are read, as often as they are.
        state_per_token: bytes that each committed token adds to the head's state.
        state_fixed: bytes of a row's state that do not grow.
    """

    drafts: int
    passes: int
    multiply_adds: int
    weight_bytes: int
    state_per_token: int
    state_fixed: int


@dataclasses.dataclass(frozen=True)
class HeadRecord:
    """What a head is.

    Attributes:
        name: as the catalogue or the directory calls it.
        algorithm: the head's name in records, see `heads.base.Head`.
        targets: targets that it was made for.
        fits: targets that it can be built for, of those tried.
        refused: (why, targets) of the others.
        num_layers: its decoder layers.
        layers: the same by kind.
        taps: residual streams of the target that it reads, 0 being the embedding output.
        reads: layers of the target whose cached keys and values it reads.
        drafts: drafts per round that its publisher uses, None where none are named.
        most: most drafts that a round can have, None for any number.
        block: (slots, mask token) of a block head.
        confidence: whether it estimates how likely its drafts are to be accepted.
        vocab: tokens of the target.
        draft_vocab: tokens that it can draft.
        trained: its own parameters: those that training changes.
        stored: all that its checkpoint holds, copies of the target's matrices among them.
        max_context: longest text it is meant for, None if it does not say.
        cost: of a round of `drafts`, or as many as make sense.
        source: where its facts are from.
        published: what is known of its size.
        unverified: facts of the catalogue that are not verified.
    """

    name: str
    algorithm: str
    targets: tuple[str, ...]
    fits: tuple[str, ...]
    refused: tuple[tuple[str, tuple[str, ...]], ...]
    num_layers: int
    layers: str
    taps: tuple[int, ...]
    reads: tuple[int, ...]
    drafts: int | None
    most: int | None
    block: tuple[int, int] | None
    confidence: bool
    vocab: int
    draft_vocab: int
    trained: int
    stored: int
    max_context: int | None
    cost: Cost
    source: str
    published: Published
    unverified: tuple[str, ...]


def describe_entry(entry: HeadEntry, only: str | None = None) -> HeadRecord:
    """Describe a head of the catalogue.

    Args:
        entry: the head.
        only: the one target to try, name or directory; None tries the whole catalogue.

    Raises:
        PairingError: it fits no target that was tried.
    """
    return describe(entry, candidates(only))


def describe_directory(path: str | Path, only: str | None = None) -> HeadRecord:
    """Describe a checkpoint directory; only headers of its weights are read, if it has any.

    Raises:
        PairingError: it fits no target that was tried.
        CheckpointError: no `config.json`, or none of a draft head, or broken weights.
    """
    return describe(directory_entry(path), candidates(only))


def directory_entry(path: str | Path) -> HeadEntry:
    """Return a checkpoint directory as an entry like the catalogue's; headers of weights are read.

    Raises:
        CheckpointError: no `config.json`, or broken weights.
    """
    root = resolve(path)
    held = any(root.glob("*.safetensors*"))
    config = read_config(root)
    return HeadEntry(
        name=root.name,
        config=config,
        source=str(root),
        targets=(),
        drafts=None,
        published=Published(),
        stores=pairing.with_lent(config, TensorReader(root).shapes, str(root)) if held else {},
    )


def candidates(only: str | None = None) -> dict[str, TargetInfo]:
    """Return the facts of one target, name or directory, or of all in the catalogue.

    Raises:
        CheckpointError: no such target.
    """
    if only is None:
        return {name: targets.read(name).build().info for name in targets.names()}
    if Path(only).expanduser().is_dir():
        root = resolve(only)
        return {root.name: from_config(text_config(read_config(root))).info}
    return {only: targets.read(only).build().info}


def describe(entry: HeadEntry, infos: Mapping[str, TargetInfo]) -> HeadRecord:
    """Describe a head without its weights.

    Args:
        entry: the head.
        infos: targets to try. It is described as built for the first one that it was made for, or
            else for the first one that it fits.

    Raises:
        PairingError: it fits none of them.
    """
    kind = entry.kind  # before anything else, since nothing fits what is no head
    built: dict[str, Any] = {}
    refused: dict[str, list[str]] = collections.defaultdict(list)
    for name, info in infos.items():
        try:
            built[name] = entry.build(info)
        except PairingError as error:
            if len(infos) == 1:
                raise
            refused[str(error).replace(entry.name, "it", 1)].append(name)
    if not built:
        reason, names = next(iter(refused.items()))
        raise PairingError(
            f"{entry.name}, a head of kind {kind}, fits no target of the catalogue ({names[0]}:"
            f" {reason}); name its own: specjax heads HEAD TARGET"
        )
    on = next((name for name in entry.targets if name in built), next(iter(built)))
    head, info = built[on], infos[on]
    trained, stored = parameter_counts(head)
    layers = layer_words(head)
    return HeadRecord(
        name=entry.name,
        algorithm=head.name,
        targets=entry.targets,
        fits=tuple(built),
        refused=tuple((why, tuple(names)) for why, names in refused.items()),
        num_layers=len(layers),
        layers=_grouped(layers),
        taps=tuple(head.taps),
        reads=tuple(head.reads),
        drafts=entry.drafts,
        most=head.max_tokens,
        block=_block(head),
        confidence=getattr(head, "has_confidence", False),
        vocab=info.vocab,
        draft_vocab=getattr(head, "draft_vocab", info.vocab),
        trained=trained,
        stored=stored,
        max_context=getattr(head, "max_context", 0) or None,
        cost=round_cost(head, info, _usual(head, entry.drafts)),
        source=entry.source,
        published=entry.published,
        unverified=entry.unverified,
    )


def parameter_counts(head: Any) -> tuple[int, int]:
    """Count a head's parameters: (those that training changes, all). Tables of ids are none."""
    flags = [bool(leaf) for leaf in jax.tree.leaves(head.trainable())]
    specs = [spec for _, spec in leaves_with_names(head.specs())]
    pairs = [(math.prod(s.shape), f) for s, f in zip(specs, flags, strict=True) if not s.dtype]
    return sum(size for size, trained in pairs if trained), sum(size for size, _ in pairs)


def layer_words(head: Any) -> tuple[str, ...]:
    """Return what each of a head's decoder layers is, as tables show it."""
    names = [spec.hf for _, spec in leaves_with_names(head.specs())]
    found = {m[0] for name in names if (m := re.search(r"layers\.\d+\.|midlayer\.", name))}
    if head.name == "mtp":
        return (head.layer.cache.name,) * len(found)
    window = getattr(head, "window", lambda layer: None)
    windows = [window(i) for i in range(len(found))]
    return tuple("full" if w is None else f"sliding-window {w}" for w in windows)


def _grouped(layers: tuple[str, ...]) -> str:
    return ", ".join(f"{n} {word}" for word, n in sorted(collections.Counter(layers).items()))


def round_cost(head: Any, info: TargetInfo, drafts: int) -> Cost:
    """Return what a round costs, see `Cost`."""
    used = list(_matrices(head, info))
    small, large = (_state_bytes(head, capacity) for capacity in _CAPACITIES)
    grown = (large - small) // (_CAPACITIES[1] - _CAPACITIES[0])
    uses = [(size, *_use(head, name, drafts)) for name, size in used]
    return Cost(
        drafts=drafts,
        passes=1 if _is_block(head) else drafts,
        multiply_adds=sum(size * rows for size, rows, _ in uses),
        weight_bytes=sum(size * reads * _BYTES for size, _, reads in uses),
        state_per_token=grown,
        state_fixed=small - grown * _CAPACITIES[0],
    )


def _use(head: Any, name: str, drafts: int) -> tuple[int, int]:
    """Return (rows that go through a matrix, times it is read) in a round."""
    if name == "fc.weight":  # fuses the committed token's states
        return 1, 1
    if not _is_block(head):
        times = drafts  # one pass for each draft
        if head.name == "mtp" and (module := re.match(r"mtp_layers\.(\d+)\.", name)):
            # Each module gives one draft, the last one all that follow.
            times = max(drafts - head.modules + 1, 1) if int(module[1]) + 1 == head.modules else 1
        return times, times
    if name.endswith(("k_proj.weight", "v_proj.weight")):  # context and slots, one after the other
        return head.config.block_size + 1, 2
    if name.startswith("layers."):
        return head.config.block_size, 1
    if name.startswith("markov_head."):
        return drafts, drafts
    return drafts, 1


def _matrices(head: Any, info: TargetInfo) -> Iterator[tuple[str, int]]:
    """Iterate over (name, numbers) of the matrices that a token is multiplied with.

    Embeddings are looked up, which costs next to nothing. Of experts those count that a token is
    routed to; an output layer that the head lacks is the target's.
    """
    output = head.name == "gemma4_mtp"  # the assistant's is its own embedding
    for _, spec in leaves_with_names(head.specs()):
        if len(spec.shape) < 2 or spec.hf.endswith("markov_w1.weight"):
            continue
        if spec.hf.endswith("embed_tokens.weight"):
            if output:
                yield spec.hf, _scored(head, spec)
            continue
        output |= spec.hf.endswith("lm_head.weight")
        yield spec.hf, _used(head, spec)
    if not output:
        yield "lm_head.weight", info.vocab * info.hidden


def _scored(head: Any, spec: ParamSpec) -> int:
    """Return how many numbers of an assistant's embedding are read to score its tokens."""
    size, clusters = math.prod(spec.shape), head.config.centroids
    return size // clusters * head.config.centroid_top_k if clusters else size


def _used(head: Any, spec: ParamSpec) -> int:
    """Return how many numbers of a weight a token is multiplied with."""
    size = math.prod(spec.shape)
    if spec.axes[0] != "experts":
        return size
    router = next(routers(head))
    return size // router.experts * router.top_k


def _state_bytes(head: Any, capacity: int) -> int:
    """Return the bytes of one row's state."""
    state = jax.eval_shape(lambda: head.init_state(1, capacity, "bfloat16"))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _block(head: Any) -> tuple[int, int] | None:
    """Return (slots, mask token) of a block head."""
    return (head.config.block_size, head.config.mask_token_id) if _is_block(head) else None


def _is_block(head: Any) -> bool:
    """Whether it drafts a block in one pass."""
    return head.name in ("dflash", "dspark")


def _usual(head: Any, drafts: int | None) -> int:
    """Return how many drafts a round is costed for."""
    return drafts or (_DRAFTS if head.max_tokens is None else head.max_tokens)
