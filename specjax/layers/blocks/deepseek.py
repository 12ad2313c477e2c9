"""The layers of DeepSeek-V3 and Kimi: latent attention, then a dense or a sparse feed-forward."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from flax import struct

from specjax.layers.blocks.dense import MlpWeights, mlp, norm_spec
from specjax.layers.blocks.sparse import SparseConfig, SparseWeights, sparse_mlp
from specjax.layers.cache.latent import LatentKind
from specjax.layers.context import Context
from specjax.layers.mla import MlaConfig, MlaWeights, mla
from specjax.layers.norm import rms_norm
from specjax.layers.rope import RopeConfig

Weight = Any


@struct.dataclass
class DeepseekLayerWeights:
    """One decoder layer; its feed-forward is dense or sparse."""

    attention: MlaWeights
    feed_forward: MlpWeights | SparseWeights
    input_norm: Weight
    post_norm: Weight


@dataclasses.dataclass(frozen=True)
class DeepseekLayer:
    """The layer itself, see `layers.layer_kind.LayerKind`.

    Attributes:
        attention: the latent attention.
        feed_forward: the width of a dense MLP, or a sparse feed-forward.
    """

    attention: MlaConfig
    feed_forward: int | SparseConfig
    label: ClassVar[str] = "latent"

    @property
    def cache(self) -> LatentKind:
        """What it keeps of its past: a latent and a rope key per position."""
        return self.attention.cache

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope tables it needs."""
        return (self.attention.rope,)

    def abstract(self, prefix: str) -> DeepseekLayerWeights:
        """Return its weight table."""
        hidden = self.attention.hidden
        return DeepseekLayerWeights(
            attention=MlaWeights.abstract(self.attention, f"{prefix}self_attn."),
            feed_forward=(
                MlpWeights.abstract(hidden, self.feed_forward, f"{prefix}mlp.")
                if isinstance(self.feed_forward, int)
                else SparseWeights.abstract(self.feed_forward, prefix)
            ),
            input_norm=norm_spec(hidden, f"{prefix}input_layernorm.weight"),
            post_norm=norm_spec(hidden, f"{prefix}post_attention_layernorm.weight"),
        )

    def run(
        self, weights: DeepseekLayerWeights, x: jax.Array, ctx: Context, entry: Any, index: Any
    ) -> tuple[jax.Array, Any]:
        """Run T new positions through the layer."""
        del index
        eps = self.attention.eps
        y, new = mla(
            weights.attention, self.attention, rms_norm(x, weights.input_norm, eps), ctx, entry
        )
        x = x + y
        normed = rms_norm(x, weights.post_norm, eps)
        if isinstance(self.feed_forward, int):
            return x + mlp(weights.feed_forward, normed), new
        return x + sparse_mlp(weights.feed_forward, self.feed_forward, normed, ctx.layout), new
