"""Which experts a token goes to, and with what weights: one function for every family.

    s = softmax(logits) or sigmoid(logits)            over all experts
    choice = s + choice_bias                          decides, but never weighs
    ids = top-k of choice, within the best groups where experts stand in groups
    w = s[ids] [/ sum] * scaling [* expert_scale[ids]]

Qwen3-MoE and Qwen3.5: softmax. Gemma 4: softmax and `expert_scale`. DeepSeek-V3 and Kimi-K2.5:
sigmoid, bias, groups, scaling. MiniMax-M2: sigmoid and bias.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.core.errors import CheckpointError

SCORES = ("softmax", "sigmoid")
_GROUP_BEST = 2  # experts whose choices add up to the score of their group


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How a router chooses and weighs.

    Attributes:
        experts: number of experts E.
        top_k: experts per token.
        score: "softmax" or "sigmoid" of the logits.
        normalise: whether the chosen weights are divided by their sum.
        scaling: factor on the weights, after the division.
        groups: groups of E / groups neighbouring experts; 1 means no groups.
        top_groups: groups per token, the others give no expert.
    """

    experts: int
    top_k: int
    score: str
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that do not fit together."""
        if self.score not in SCORES:
            raise CheckpointError(f"router: score {self.score!r}; have {', '.join(SCORES)}")
        if self.groups < 1 or self.experts % self.groups:
            raise CheckpointError(
                f"router: {self.experts} experts do not divide into {self.groups} groups"
            )
        if not 1 <= self.top_groups <= self.groups:
            raise CheckpointError(f"router: {self.top_groups} of {self.groups} groups per token")
        size = self.experts // self.groups
        if self.groups > 1 and size < _GROUP_BEST:
            raise CheckpointError(
                f"router: groups of {size} expert; a group is scored by its best {_GROUP_BEST}"
            )
        if not 1 <= self.top_k <= self.top_groups * size:
            raise CheckpointError(
                f"router: top_k {self.top_k} of {self.top_groups * size} experts to choose from"
            )


def route(
    logits: Float[Array, "N E"],
    config: RouterConfig,
    choice_bias: Float[Array, " E"] | None = None,
    expert_scale: Float[Array, " E"] | None = None,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Choose experts for N tokens, in float32.

    Args:
        logits: the router's product; float32, or the choice would depend on rounding.
        config: how to choose.
        choice_bias: added to the scores for the choice alone.
        expert_scale: factor on the weight of each expert.

    Returns:
        (ids int32, weights float32), by falling choice; of equal ones the lowest id comes first.
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if config.score == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if choice_bias is None else scores + choice_bias.astype(jnp.float32)
    if config.top_groups < config.groups:
        choice = _within_groups(choice, config)
    _, ids = jax.lax.top_k(jax.lax.stop_gradient(choice), config.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.normalise:
        # The guard of DeepSeek's formula; it is below the rounding of every sum but those that
        # sigmoids of about -40 and less add up to.
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    weights = weights * config.scaling
    if expert_scale is not None:
        weights = weights * expert_scale.astype(jnp.float32)[ids]
    return ids.astype(jnp.int32), weights


def _within_groups(choice: jax.Array, config: RouterConfig) -> jax.Array:
    """Set the choice of experts outside the best groups to minus infinity."""
    grouped = choice.reshape(*choice.shape[:-1], config.groups, -1)
    best = jax.lax.top_k(grouped, _GROUP_BEST)[0].sum(-1)
    _, kept = jax.lax.top_k(best, config.top_groups)
    keep = (kept[..., None] == jnp.arange(config.groups)).any(-2)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(choice.shape)
