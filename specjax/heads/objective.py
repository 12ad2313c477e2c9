"""From logits to a loss, whatever the head: terms per slot, weights of slots, one division.

A slot is a prediction: a row of EAGLE-3's step, a position of an MTP step, a slot of a block. The
terms are those of `layers.losses`; an `Objective` picks terms, weights and divisor, so that every
head can be trained by every published recipe.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.heads.objective_config import Objective
from specjax.layers import losses

__all__ = ["Objective", "needs_teacher", "reduce", "slot_terms", "slot_weights", "total"]

_WEIGHT_EPSILON = 1e-6  # DeepSpec's


def needs_teacher(objective: Objective) -> bool:
    """Whether a term compares with the target's distribution."""
    return objective.terms != ("hard_ce",)


def slot_terms(
    objective: Objective,
    draft: Float[Array, "*B V"],
    target: Float[Array, "*B V"] | None,
    labels: Int[Array, "*B"] | None,
) -> dict[str, Float[Array, "*B"]]:
    """Return each term of the objective per slot, float32, not weighted.

    Args:
        objective: which terms.
        draft: the head's logits.
        target: the target's logits of the same slots, over the same vocabulary; no gradient goes
            there. None where no term needs it.
        labels: the text's token of each slot, as an index of that vocabulary; for "hard_ce".
    """
    out: dict[str, jax.Array] = {}
    for name in objective.terms:
        if name == "hard_ce":
            assert labels is not None
            out[name] = losses.hard_cross_entropy(draft, labels)
            continue
        assert target is not None
        if name == "soft_ce":
            probs = jax.nn.softmax(jax.lax.stop_gradient(target).astype(jnp.float32), axis=-1)
            out[name] = losses.soft_cross_entropy(draft, probs)
        elif name == "l1":
            out[name] = 2.0 * losses.tv(draft, target)
        elif name == "lk_hybrid":
            out[name] = losses.lk_hybrid(draft, target, objective.lk_eta)
        else:
            out[name] = losses.TERMS[name](draft, target)
    return out


def slot_weights(
    objective: Objective,
    slot: Int[Array, "*b"],
    mask: Bool[Array, "*B K"],
    terms: Mapping[str, Float[Array, "*B K"]],
) -> Float[Array, "*B K"]:
    """Return the weight of each slot, 0 outside the mask, without a gradient.

    Args:
        objective: which weighting.
        slot: index k of each slot in its block (or its step), broadcastable to the mask.
        mask: slots that count; for "dpace" the slots of a block are the last axis.
        terms: of `slot_terms`; "dpace" reads its cross entropy.
    """
    if objective.weighting == "dpace":
        entropy = terms["hard_ce"] if "hard_ce" in terms else terms["ce"]
        return losses.dpace_weights(entropy, mask, objective.dpace_alpha)
    weights = losses.position_weights(objective.weighting, slot, objective.gamma, objective.base)
    return jnp.where(mask, weights, 0.0)


def reduce(
    objective: Objective,
    term: Float[Array, "B ..."],
    mask: Bool[Array, "B ..."],
    weights: Float[Array, "B ..."],
) -> Float[Array, ""]:
    """Return the weighted sum of a term over the slots that count, divided as the objective says.

    Without any slot that counts it is 0. Rows are axis 0.
    """
    # Selected, not multiplied: what stands in uncounted slots, NaN included, has no part in it.
    value = jnp.where(mask, term * weights, 0.0)
    count = mask.astype(jnp.float32)
    if objective.normaliser == "counted_per_row":
        rows = mask.shape[0]
        value, count = value.reshape(rows, -1).sum(-1), count.reshape(rows, -1).sum(-1)
        return jnp.mean(value / (count + losses.MASK_EPSILON))
    if objective.normaliser == "all":
        divisor: jax.Array | float = float(max(mask.size, 1))
    elif objective.normaliser == "rows":
        divisor = float(mask.shape[0])
    elif objective.normaliser == "counted":
        divisor = jnp.maximum(count.sum(), 1.0)
    else:
        weight = jnp.where(mask, weights, 0.0).sum()
        bare = objective.normaliser == "weights"
        divisor = jnp.where(weight > 0, weight, 1.0) if bare else weight + _WEIGHT_EPSILON
    return value.sum() / divisor


def total(
    objective: Objective,
    terms: Mapping[str, Float[Array, "B ..."]],
    mask: Bool[Array, "B ..."],
    weights: Float[Array, "B ..."],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return (the terms reduced, times their factors, added; each reduced term without factor)."""
    parts = {name: reduce(objective, term, mask, weights) for name, term in terms.items()}
    loss = sum(
        (factor * parts[name] for name, factor in objective.shares.items()),
        jnp.zeros((), jnp.float32),
    )
    return loss, parts
