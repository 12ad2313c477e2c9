"""DSpark's confidence head: how likely the draft of a slot is accepted if those before it were.

    c_k = sigmoid(w f_k + beta),  f_k = [h_k ; W1[t_k]] or h_k

t_k is the token before the slot's draft: a confidence never depends on the draft that it judges,
which is what keeps scheduled verification lossless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.params import ParamSpec
from specjax.heads.dflash.sequential import markov_embedding
from specjax.layers.linear import linear_f32

if TYPE_CHECKING:
    from specjax.heads.dflash.head import DFlashHead
    from specjax.heads.dflash.network import DFlashWeights

Weight = Any


@struct.dataclass
class ConfidenceWeights:
    """A linear read-out.

    Attributes:
        weight: `[1, H]`, or `[1, H + r]` with the sequential head's embedding.
        bias: `[1]`.
    """

    weight: Weight
    bias: Weight


def confidence_specs(head: DFlashHead) -> ConfidenceWeights | None:
    """Return the weight table, None for a head without one."""
    config = head.config
    if not config.confidence:
        return None
    width = head.geometry.hidden + (config.markov_rank if config.confidence_with_markov else 0)
    name = "confidence_head.proj"
    return ConfidenceWeights(
        weight=ParamSpec((1, width), (None, None), f"{name}.weight"),
        bias=ParamSpec((1,), (None,), f"{name}.bias", init="zeros"),
    )


def confidence_logits(
    head: DFlashHead,
    params: DFlashWeights,
    h: Float[Array, "*B b H"],
    previous_tokens: Int[Array, "*B b"],
) -> Float[Array, "*B b"]:
    """Return float32 logits of the confidences.

    Args:
        head: what it is; it must have a confidence head.
        params: the head's weights.
        h: the backbone's states after the final norm.
        previous_tokens: target ids of the token before each slot's draft.
    """
    features, weights = h, params.confidence
    assert weights is not None
    if head.config.confidence_with_markov:
        assert params.markov is not None
        embedded = markov_embedding(params.markov, previous_tokens, h.dtype)
        features = jnp.concatenate([h, embedded], axis=-1)
    return linear_f32(features, weights.weight, weights.bias)[..., 0]


def calibrated(
    logits: Float[Array, "*B K"], temperatures: tuple[float, ...]
) -> Float[Array, "*B K"]:
    """Return confidences of the first K drafts.

    Args:
        logits: of the confidences.
        temperatures: one per draft of a whole block, () where the head is not calibrated.
    """
    if temperatures:
        logits = logits / jnp.asarray(temperatures[: logits.shape[-1]], jnp.float32)
    return jax.nn.sigmoid(logits)
