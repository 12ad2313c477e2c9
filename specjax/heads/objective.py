"""From logits to a loss, whatever the head: terms per slot, weights of slots, one division.

A slot is a prediction: a row of EAGLE-3's step, a position of an MTP step, a slot of a block. The
terms are those of `layers.losses`; an `Objective` picks terms, weights and divisor, so that every
head can be trained by every published recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.heads.objective_config import Objective
from specjax.layers import losses
from specjax.layers.sampling import first_argmax

__all__ = [
    "Objective",
    "Slots",
    "compare",
    "draft_labels",
    "needs_teacher",
    "over_steps",
    "reduce",
    "slot_terms",
    "slot_weights",
    "total",
]

_WEIGHT_EPSILON = 1e-6  # DeepSpec's
_OVERLAP = "overlap"  # what lk_lambda reads beside its own entry


@struct.dataclass
class Slots:
    """What comparing a head's logits with the target's gives per slot.

    Attributes:
        terms: loss terms by name, float32, not weighted.
        accept: the overlap of both distributions, without a gradient; None without a teacher.
        pred: the head's most probable id.
        best: the target's most probable one among what can be drafted; None without a teacher.
    """

    terms: dict[str, Float[Array, "*B"]]
    accept: Float[Array, "*B"] | None
    pred: Int[Array, "*B"]
    best: Int[Array, "*B"] | None


def needs_teacher(objective: Objective) -> bool:
    """Whether a term compares with the target's distribution."""
    return objective.terms != ("hard_ce",)


def compare(
    objective: Objective,
    draft: Float[Array, "*B V"],
    target: Float[Array, "*C V"] | None,
    labels: Int[Array, "*B"] | None,
    mass: Float[Array, "*C"] | None = None,
) -> Slots:
    """Compare logits slot by slot.

    Args:
        objective: which terms.
        draft: the head's logits.
        target: the target's logits of the same slots (or of size 1 where slots share them), over
            the same vocabulary; no gradient goes there. None where no term needs it.
        labels: the text's token of each slot, as an index of that vocabulary; for "hard_ce".
        mass: share of the target's whole distribution that this vocabulary holds, where acceptance
            is to be told by the whole; None takes the vocabulary for the whole.
    """
    terms: dict[str, jax.Array] = {}
    if "hard_ce" in objective.terms:
        assert labels is not None
        terms["hard_ce"] = losses.hard_cross_entropy(draft, labels)
    accept = best = None
    if target is not None:
        both = losses.pair(draft, target)
        overlap, best = losses.shared(both, mass), both.best[..., 0]
        accept = jax.lax.stop_gradient(overlap)
        for name in objective.terms:
            if name == "lk_alpha":
                terms[name] = overlap
            elif name == "lk_lambda":
                terms |= {name: losses.term("soft_ce", both), _OVERLAP: overlap}
            elif name != "hard_ce":
                terms[name] = losses.term(name, both, objective.lk_eta)
    else:
        assert not needs_teacher(objective)
    return Slots(terms, accept, first_argmax(draft), best)


def slot_terms(
    objective: Objective,
    draft: Float[Array, "*B V"],
    target: Float[Array, "*C V"] | None,
    labels: Int[Array, "*B"] | None,
) -> dict[str, Float[Array, "*B"]]:
    """Return the terms of `compare` alone."""
    return compare(objective, draft, target, labels).terms


def draft_labels(
    kept: Bool[Array, " V"] | None, labels: Int[Array, "*B"]
) -> tuple[Int[Array, "*B"], Bool[Array, "*B"]]:
    """Return (draft ids of target ids, whether they can be drafted).

    Args:
        kept: which target ids can be drafted (`t2d`); None: all, under the same ids.
        labels: target ids.
    """
    if kept is None:
        return labels, jnp.ones(labels.shape, bool)
    ids = jnp.maximum(jnp.cumsum(kept.astype(jnp.int32)) - 1, 0)
    return ids[labels], kept[labels]


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
        terms: of `compare`; "dpace" reads its cross entropy.
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
    """Return (the terms reduced, times their factors, added; each reduced term without factor).

    The losses on step means take the mean over what counts, by weight, whatever the divisor.
    """
    parts: dict[str, jax.Array] = {}
    for name in objective.terms:
        if name == "lk_alpha":
            parts[name] = losses.lk_alpha(terms[name], mask, objective.lk_scale, weights)
            continue
        parts[name] = reduce(objective, terms[name], mask, weights)
        if name == "lk_lambda":
            scale, decay = objective.lk_scale, objective.lk_decay
            mixed = losses.lk_lambda(parts[name], terms[_OVERLAP], mask, scale, decay, weights)
            # Where nothing counts there is nothing to learn: not 1 - 0.
            parts[name] = jnp.where(jnp.any(mask), mixed, 0.0)
    loss = sum(
        (factor * parts[name] for name, factor in objective.shares.items()),
        jnp.zeros((), jnp.float32),
    )
    return loss, parts


def over_steps(
    objective: Objective,
    terms: Mapping[str, Float[Array, "B S K"]],
    mask: Bool[Array, "B S K"],
    shares: Sequence[float],
) -> tuple[Float[Array, ""], list[Float[Array, ""]], Float[Array, "B S K"]]:
    """Reduce the K steps of an unrolled head, each for itself; its steps are a row's slots.

    Args:
        objective: terms, weights and divisor of a step.
        terms: of `compare`, steps last.
        mask: rows that count at each step.
        shares: weight of each step in the loss.

    Returns:
        (loss, each step's without its share, weights of the rows).
    """
    weights = slot_weights(objective, jnp.arange(mask.shape[-1]), mask, terms)
    values = []
    for k in range(mask.shape[-1]):
        own = {name: term[..., k] for name, term in terms.items()}
        values.append(total(objective, own, mask[..., k], weights[..., k])[0])
    weighted = (share * value for share, value in zip(shares, values, strict=True))
    return sum(weighted, jnp.zeros((), jnp.float32)), values, weights
