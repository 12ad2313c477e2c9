"""The layer of Qwen3-MoE and MiniMax: grouped-query attention, then a sparse feed-forward."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from flax import struct

from specjax.layers.blocks.dense import AttentionWeights, BlockConfig, attention, norm_spec
from specjax.layers.blocks.sparse import SparseConfig, SparseWeights, sparse_mlp
from specjax.layers.cache.full import FullCache, FullKind
from specjax.layers.context import Context
from specjax.layers.norm import rms_norm
from specjax.layers.rope import RopeConfig

Weight = Any


@struct.dataclass
class SparseLayerWeights:
    """One decoder layer with experts."""

    attention: AttentionWeights
    sparse: SparseWeights
    input_norm: Weight
    post_norm: Weight


@dataclasses.dataclass(frozen=True)
class SparseLayer:
    """The layer itself, see `layers.layer_kind.LayerKind`."""

    block: BlockConfig
    sparse: SparseConfig
    label: ClassVar[str] = "full"

    @property
    def cache(self) -> FullKind:
        """What it keeps of its past."""
        return self.block.cache

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope tables it needs."""
        return (self.block.rope,)

    def abstract(self, prefix: str) -> SparseLayerWeights:
        """Return its weight table."""
        hidden = self.block.hidden
        return SparseLayerWeights(
            attention=AttentionWeights.abstract(self.block, f"{prefix}self_attn."),
            sparse=SparseWeights.abstract(self.sparse, prefix),
            input_norm=norm_spec(hidden, f"{prefix}input_layernorm.weight"),
            post_norm=norm_spec(hidden, f"{prefix}post_attention_layernorm.weight"),
        )

    def run(
        self,
        weights: SparseLayerWeights,
        x: jax.Array,
        ctx: Context,
        entry: FullCache | None,
        index: Any,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Run T new positions through the layer."""
        del index
        eps = self.block.eps
        normed = rms_norm(x, weights.input_norm, eps)
        y, new = attention(weights.attention, self.block, normed, ctx, entry)
        x = x + y
        normed = rms_norm(x, weights.post_norm, eps)
        return x + sparse_mlp(weights.sparse, self.sparse, normed, ctx.layout), new
