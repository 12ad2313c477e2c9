"""A block head to be trained for a target: sizes, taps and layout, from settings and the target."""

from __future__ import annotations

import dataclasses

from specjax.core.errors import ConfigError, PairingError
from specjax.heads.dflash.config import DFlashConfig, LayerType, Layout
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.blocks.gemma4 import Gemma4Attention, Gemma4Layer
from specjax.layers.blocks.geometry import Gemma4Geometry, Geometry, PlainGeometry
from specjax.layers.cache.full import FullKind
from specjax.targets.base import KeyLayer, TargetInfo


def spread_taps(count: int, layers: int) -> tuple[int, ...]:
    """Return `count` residual streams spread over a target, by z-lab's rule.

    The outputs of layers 1 to L - 3 at equal distances, rounded half to even; the middle one if
    it is a single one. On a target too shallow for that, those that are left.
    """
    if count == 1:
        ids = [layers // 2]
    else:
        ids = [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    inner = {min(max(i, 0), max(layers - 2, 0)) for i in ids}
    return tuple(sorted(i + 1 for i in inner)) if layers > 1 else (0,)


def resolve(
    info: TargetInfo, config: DFlashConfig, draft_vocab: int | None
) -> tuple[Geometry, DFlashConfig]:
    """Return (layers, settings with nothing left open) of a head for a target.

    Raises:
        PairingError: sizes or a mask token that do not fit the target.
        ConfigError: the layout asked for cannot express the head, or the mask token is not given.
    """
    if config.mask_token_id < 0:
        raise ConfigError(
            "DFlash.mask_token_id must name a token that no text contains (published heads:"
            " 151669 of Qwen3, 4 of Gemma 4)"
        )
    if draft_vocab is not None and not 0 < draft_vocab <= info.vocab:
        raise PairingError(f"a draft vocabulary of {draft_vocab} of {info.vocab} tokens")
    full: LayerType = "full"
    types = tuple(config.layer_types) or (full,) * config.layers
    config = dataclasses.replace(
        config,
        taps=tuple(config.taps) or spread_taps(config.layers, info.num_layers),
        layer_types=types,
        layout=choose_layout(config, draft_vocab),
    )
    check_taps(config, info)
    block = sized_block(info, config)
    plain = config.body == "plain"
    geometry = PlainGeometry(block) if plain else gemma4_geometry(info, block)
    return geometry, settled(config, geometry)


def settled(config: DFlashConfig, geometry: Geometry) -> DFlashConfig:
    """Return settings that say what the layers are, and nothing where there is nothing to say.

    So that a head and what is read back of it are equal.
    """
    kv_heads, head_dim, _ = geometry.sizes
    if isinstance(geometry, PlainGeometry):
        heads, mlp = geometry.block.heads, geometry.block.mlp
    else:
        heads, mlp = geometry.layer.attention.heads, geometry.layer.mlp
    sliding = "sliding" in config.layer_types
    return dataclasses.replace(
        config,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        sliding_window=config.sliding_window if sliding else 0,
        causal="sliding" if config.causal == "none" and not sliding else config.causal,
        markov_head=config.markov_head if config.markov_rank else "vanilla",
    )


def check_taps(config: DFlashConfig, info: TargetInfo) -> None:
    """Refuse taps that the target does not have.

    The output of its last layer counts as one in speculators' layout alone: some implementations
    that the others come from hand it out normed.

    Raises:
        PairingError: naming them.
    """
    most = info.num_layers - (config.layout != "speculators")
    if not config.taps or any(not 0 <= tap <= most for tap in config.taps):
        raise PairingError(
            f"the head taps residual streams {list(config.taps)}; a target with {info.num_layers}"
            f" layers has 0..{most} for a head in {config.layout} layout"
        )


def choose_layout(config: DFlashConfig, draft_vocab: int | None) -> Layout:
    """Return the layout asked for, or the plainest that can express a head.

    Raises:
        ConfigError: the layout asked for cannot.
    """
    reasons: dict[Layout, str] = {
        "zlab": zlab_lacks(config, draft_vocab),
        "deepspec": deepspec_lacks(config, draft_vocab),
        "speculators": speculators_lacks(config),
    }
    wanted: tuple[Layout, ...] = (config.layout,) if config.layout else tuple(reasons)
    for layout in wanted:
        if not reasons[layout]:
            return layout
    said = "; ".join(f"{layout} has no {reasons[layout]}" for layout in wanted)
    raise ConfigError(f"no layout can express this DFlash head: {said}")


def zlab_lacks(config: DFlashConfig, draft_vocab: int | None) -> str:
    """Name what of a head z-lab's layout has no words for, "" if nothing."""
    if config.sample_from_anchor:
        return "sample_from_anchor"
    if config.markov_rank or config.confidence:
        return "sequential or confidence head"
    if config.body != "plain":
        return "Gemma 4 layers"
    return "draft vocabulary" if draft_vocab else ""


def deepspec_lacks(config: DFlashConfig, draft_vocab: int | None) -> str:
    """Name what of a head DeepSpec's layout has no words for, "" if nothing."""
    if not config.sample_from_anchor:
        return "slots that predict their own position (sample_from_anchor False)"
    if "sliding" in config.layer_types:
        return "sliding layers"
    if config.causal == "all":
        return "causal full-attention layers"
    return "draft vocabulary" if draft_vocab else ""


def speculators_lacks(config: DFlashConfig) -> str:
    """Name what of a head speculators' layout has no words for, "" if nothing."""
    if config.causal == "all":
        return "causal full-attention layers"
    return "" if config.body == "plain" else "Gemma 4 layers"


def sized_block(info: TargetInfo, config: DFlashConfig) -> BlockConfig:
    """Return the target's block with the sizes that the settings change.

    Queries and keys have norms whatever the target's: all published block heads do.

    Raises:
        PairingError: the target says no block, or the sizes do not go together.
    """
    block = info.draft_block
    if block is None:
        raise PairingError(f"a {info.family} target says no block that draft layers could copy")
    heads, kv_heads = config.heads or block.heads, config.kv_heads or block.kv_heads
    if heads % kv_heads:
        raise PairingError(f"DFlash: {heads} heads do not divide over {kv_heads} kv_heads")
    head_dim, rope = config.head_dim or block.head_dim, block.rope
    if head_dim != block.head_dim:
        if rope.dims != block.head_dim:
            raise PairingError("DFlash.head_dim cannot differ where the target rotates part of it")
        rope = dataclasses.replace(rope, dims=head_dim)
    return dataclasses.replace(
        block,
        hidden=info.hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=config.mlp or block.mlp,
        rope=rope,
        qk_norm=True,
        whole_norm=False,
        inputs=0,
    )


def gemma4_geometry(info: TargetInfo, block: BlockConfig) -> Gemma4Geometry:
    """Return layers like the full-attention ones of a Gemma 4 target, keys serving as values.

    Raises:
        PairingError: the target is another.
    """
    full = [layer for layer in info.key_layers if layer and isinstance(layer.cache, FullKind)]
    if not info.family.startswith("gemma4") or not full:
        raise PairingError(f"DFlash.body 'gemma4' needs a Gemma 4 target, not {info.family}")
    like: KeyLayer = full[-1]
    assert isinstance(like.cache, FullKind)
    attention = Gemma4Attention(
        hidden=info.hidden,
        heads=block.heads,
        kv_heads=like.cache.kv_heads,
        head_dim=like.cache.k_dim,
        eps=block.eps,
        rope=like.rope,
        value_is_key=True,
    )
    return Gemma4Geometry(Gemma4Layer(attention, block.mlp))
