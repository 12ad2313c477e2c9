"""What a target is, as a record: its layers, sizes, memory, and the drafters that fit it.

Everything is computed from the layers' descriptions and weight tables; no weight is read.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.core.params import count, leaves_with_names
from specjax.io.hf import TensorReader, read_config, read_stop_ids, resolve
from specjax.io.quant import quantization_method
from specjax.layers.layer_kind import LayerKind
from specjax.layers.router import RouterConfig
from specjax.targets.base import Target
from specjax.targets.catalog import CatalogEntry, Published
from specjax.targets.loading import TOWERS, from_config, text_config

# Drafters that need nothing but what every target has, by their names in records.
_ANY = {
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "ngram": "prompt lookup",
    "small_model": "small model",
}
_WORDS = {"full": "full", "latent": "latent", "window": "sliding-window", "recurrent": "recurrent"}
# Where quantisation methods list the modules that they leave out.
_LEFT_OUT = ("ignore", "modules_to_not_convert", "exclude")


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers whose attention is alike.

    Attributes:
        count: how many.
        attention: "full", "latent", "sliding-window 1024" (keys that a query sees) or "recurrent".
        shared: they read the keys and values of a layer before them.
    """

    count: int
    attention: str
    shared: bool = False

    def __str__(self) -> str:
        """The group as tables show it."""
        return f"{self.count} {self.attention}" + (" (shared)" if self.shared else "")


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """Layers whose experts are alike.

    Attributes:
        layers: how many.
        used: experts that a token is routed to.
        of: experts to choose from.
    """

    layers: int
    used: int
    of: int


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafting algorithm and whether a target can have it.

    Attributes:
        name: its name in records, see `heads.base.Head`.
        title: its name in texts.
        fits: whether the target has what it needs.
        why: what decides, "" where nothing special is needed.
    """

    name: str
    title: str
    fits: bool = True
    why: str = ""


@dataclasses.dataclass(frozen=True)
class TargetRecord:
    """What a target is.

    Attributes:
        name: as the catalogue or the directory calls it.
        family: the text model's `model_type`.
        hidden: width H of the residual stream.
        vocab: size V of the vocabulary.
        num_layers: number L of layers; the taps are 0 to L.
        layers: its layers by kind.
        experts: its sparse layers.
        parameters: of the text model, without towers and MTP modules.
        active: those that a token uses; embeddings count whole.
        cache_per_token: bytes that each committed token adds to a bfloat16 cache.
        cache_fixed: bytes of a row that do not grow: rings at full length, states, tails.
        storage: how its weights are stored.
        unquantised: modules that a quantised release leaves as they are, as it names them.
        mtp_modules: MTP modules that the checkpoint holds.
        max_context: longest context.
        stop_ids: tokens that end a text.
        source: where its facts are from.
        published: the size that the publisher names, None outside the catalogue.
        unverified: facts of the catalogue that are not verified.
        skipped: (what, tensors) of a checkpoint that is not read; None where there are no weights.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    num_layers: int
    layers: tuple[LayerGroup, ...]
    experts: tuple[ExpertGroup, ...]
    parameters: int
    active: int
    cache_per_token: int
    cache_fixed: int
    storage: str
    unquantised: tuple[str, ...]
    mtp_modules: int
    max_context: int
    stop_ids: tuple[int, ...]
    source: str = ""
    published: Published | None = None
    unverified: tuple[str, ...] = ()
    skipped: tuple[tuple[str, int], ...] | None = None

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Every drafter, and whether it fits."""
        mtp = "" if self.mtp_modules else "the checkpoint holds no MTP module"
        gemma = "" if self.family.startswith("gemma4") else "made for Gemma 4"
        return (
            *(Drafter(name, title) for name, title in _ANY.items()),
            Drafter("mtp", "Native MTP", not mtp, mtp),
            Drafter("gemma4_mtp", "Gemma 4 MTP", not gemma, gemma),
        )


def describe_entry(entry: CatalogEntry) -> TargetRecord:
    """Describe a target of the catalogue."""
    record = describe(entry.name, entry.build(), entry.config)
    return dataclasses.replace(
        record, source=entry.source, published=entry.published, unverified=entry.unverified
    )


def describe_directory(path: str | Path) -> TargetRecord:
    """Describe a checkpoint directory; only headers of its weights are read, if it has any.

    Raises:
        CheckpointError: no `config.json`, one that is not supported, or broken weights.
    """
    root = resolve(path)
    config = read_config(root)
    stops = read_stop_ids(root, text_config(config))
    target = from_config({**text_config(config), "eos_token_id": list(stops)})
    record = dataclasses.replace(describe(root.name, target, config), source=str(root))
    if not any(root.glob("*.safetensors*")):
        return record
    stored = TensorReader(root).shapes
    modules = record.mtp_modules if _holds_mtp(stored, record.num_layers) else 0
    return dataclasses.replace(record, skipped=skipped(target, stored), mtp_modules=modules)


def describe(name: str, target: Target, config: Mapping[str, Any]) -> TargetRecord:
    """Describe a target without its weights.

    Args:
        name: what to call it.
        target: the target.
        config: the configuration that it was built from, wrapper included.
    """
    info, kinds = target.info, target.config.kinds
    parameters, active = parameter_counts(target)
    storage, unquantised = _storage(config)
    caches = [kind.cache for kind in kinds if kind.cache is not None]
    return TargetRecord(
        name=name,
        family=info.family,
        hidden=info.hidden,
        vocab=info.vocab,
        num_layers=info.num_layers,
        layers=_layer_groups(kinds),
        experts=_expert_groups(kinds),
        parameters=parameters,
        active=active,
        cache_per_token=sum(cache.bytes_per_token(2) for cache in caches),
        cache_fixed=sum(cache.bytes_fixed(2) for cache in caches),
        storage=storage,
        unquantised=unquantised,
        mtp_modules=target.config.draft_modules,
        max_context=info.max_context,
        stop_ids=info.stop_ids,
    )


def parameter_counts(target: Target) -> tuple[int, int]:
    """Count a target's parameters, all of them and those that a token uses.

    Equal layers are counted once: a table of every expert of every layer takes seconds to build.

    Returns:
        (all, all but the experts that a token is not routed to).
    """
    around = dataclasses.replace(target.config, kinds=())
    total = active = count(target.family.specs(around))
    for kind, layers in collections.Counter(target.config.kinds).items():
        specs = kind.abstract("")
        size, idle = count(specs), 0
        for router in routers(kind):
            held = sum(
                math.prod(spec.shape)
                for _, spec in leaves_with_names(specs)
                # Vectors with a number per expert are the router's.
                if spec.axes[0] == "experts" and len(spec.shape) > 1
            )
            idle = held // router.experts * (router.experts - router.top_k)
        total, active = total + layers * size, active + layers * (size - idle)
    return total, active


def skipped(target: Target, names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return (pattern, how many) of the tensors that a load passes over.

    Patterns that differ in the layer's number alone are counted together.
    """
    patterns = (*TOWERS, *target.ignored)
    found = [p for name in names for p in patterns if fnmatch.fnmatch(name, p)]
    alike: dict[str, set[str]] = collections.defaultdict(set)
    for pattern in found:
        alike[re.sub(r"\.\d+\.", ".*.", pattern)].add(pattern)
    shown = {p: common if len(ps) > 1 else p for common, ps in alike.items() for p in ps}
    return tuple(collections.Counter(shown[pattern] for pattern in found).items())


def _holds_mtp(names: Iterable[str], layers: int) -> bool:
    """Whether a checkpoint has MTP weights: `mtp.*`, or a layer behind the last."""
    patterns = ("mtp.*", f"model.layers.{layers}.*")
    return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns)


def _layer_groups(kinds: Iterable[LayerKind]) -> tuple[LayerGroup, ...]:
    words: dict[str, str] = {}  # of each label, as the layers that own keys and values have it
    groups: collections.Counter[tuple[bool, str]] = collections.Counter()
    for kind in kinds:
        if (cache := kind.cache) is not None:
            window = getattr(cache, "window", None)
            words[kind.label] = _WORDS[cache.name] + (f" {window}" if window else "")
        groups[cache is None, words[kind.label]] += 1
    order = tuple(_WORDS.values())
    ordered = sorted(groups.items(), key=lambda g: (g[0][0], order.index(g[0][1].split()[0])))
    return tuple(LayerGroup(number, word, shared) for (shared, word), number in ordered)


def _expert_groups(kinds: Iterable[LayerKind]) -> tuple[ExpertGroup, ...]:
    counted = collections.Counter(router for kind in kinds for router in routers(kind))
    return tuple(ExpertGroup(layers, r.top_k, r.experts) for r, layers in counted.items())


def routers(part: Any) -> Iterator[RouterConfig]:
    """Find the router in a layer's description, wherever its family keeps it."""
    if isinstance(part, RouterConfig):
        yield part
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from routers(getattr(part, field.name))


def _storage(config: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return how weights are stored, and the modules that are left out of a quantisation."""
    quantisation = quantization_method(config)
    text = text_config(config)
    if quantisation is None:
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype")
        return (f"{dtype}, not quantised" if dtype else "not quantised"), ()
    rows, columns = quantisation.block
    block = f"groups of {columns}" if rows == 1 else f"blocks of {rows} x {columns}"
    stated = text["quantization_config"]
    left = next((stated[key] for key in _LEFT_OUT if stated.get(key)), ())
    return f"{quantisation.method} in {block}, packed", tuple(left)
