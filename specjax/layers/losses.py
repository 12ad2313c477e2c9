"""Distillation losses between a draft's and a target's logits, per slot, and how they reduce.

Everything is float32. With p the target's and q the draft's distribution, `overlap` is
`sum min(p, q)`, the probability that rejection sampling accepts the draft. The terms follow
vllm-project/speculators, the losses on step means sgl-project/SpecForge; soft cross entropy is
EAGLE-3's (arXiv 2503.01840). No term carries a gradient to the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.layers import sampling

Term = Callable[[jax.Array, jax.Array], jax.Array]
_SMALLEST_OVERLAP = 1e-5
MASK_EPSILON = 1e-5
"""What speculators adds to the count of slots it divides by."""


class Pair(NamedTuple):
    """Both distributions of a slot, so that several terms share what is costly to compute.

    Under jit, what no term reads is never computed.

    Attributes:
        draft: `[*B, V]` float32 logits.
        log_sum: `[*B, 1]` log of the sum of their exponentials.
        log_q: log probabilities of the draft.
        q: the draft's distribution.
        log_p: log probabilities of the target, without a gradient.
        p: the target's distribution, without a gradient.
        best: `[*B, 1]` the target's most probable index.
    """

    draft: Float[Array, "*B V"]
    log_sum: Float[Array, "*B 1"]
    log_q: Float[Array, "*B V"]
    q: Float[Array, "*B V"]
    log_p: Float[Array, "*C V"]
    p: Float[Array, "*C V"]
    best: Int[Array, "*C 1"]


def pair(draft: Float[Array, "*B V"], target: Float[Array, "*C V"]) -> Pair:
    """Return both distributions of logits; one target may stand for several slots (size 1)."""
    draft = draft.astype(jnp.float32)
    target = jax.lax.stop_gradient(target.astype(jnp.float32))
    log_sum = jax.nn.logsumexp(draft, axis=-1, keepdims=True)
    log_q = draft - log_sum
    log_p = target - jax.nn.logsumexp(target, axis=-1, keepdims=True)
    best = sampling.first_argmax(target)[..., None]
    return Pair(draft, log_sum, log_q, jnp.exp(log_q), log_p, jnp.exp(log_p), best)


def _divergence(p: jax.Array, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.sum(p * (log_p - log_q), axis=-1)


def _soft_ce(of: Pair) -> jax.Array:
    return of.log_sum[..., 0] - jnp.sum(of.p * of.draft, axis=-1)


def _kl_div(of: Pair) -> jax.Array:
    return _divergence(of.p, of.log_p, of.log_q)


def _rkl(of: Pair) -> jax.Array:
    return _divergence(of.q, of.log_q, of.log_p)


def _jsd(of: Pair) -> jax.Array:
    log_m = jnp.logaddexp(of.log_p, of.log_q) - jnp.log(2.0)
    return 0.5 * (_divergence(of.p, of.log_p, log_m) + _divergence(of.q, of.log_q, log_m))


def _ce(of: Pair) -> jax.Array:
    best = jnp.broadcast_to(of.best, of.log_sum.shape)
    return (of.log_sum - jnp.take_along_axis(of.draft, best, axis=-1))[..., 0]


def shared(of: Pair, mass: Float[Array, "*C"] | None = None) -> Float[Array, "*B"]:
    """Return the overlap of a pair.

    Args:
        of: the pair.
        mass: share of the target's whole distribution that these indices hold; None: all of it.
    """
    p = of.p if mass is None else of.p * mass[..., None]
    return sampling.overlap(p, of.q)


def _tv(of: Pair) -> jax.Array:
    return 1.0 - shared(of)


def _nla(of: Pair) -> jax.Array:
    return -jnp.log(jnp.maximum(shared(of), _SMALLEST_OVERLAP))


def _lk_hybrid(of: Pair, eta: float = 3.0) -> jax.Array:
    overlapping = shared(of)
    weight = jnp.exp(-eta * jax.lax.stop_gradient(overlapping))
    return weight * _kl_div(of) + (1.0 - weight) * (1.0 - overlapping)


_OF_PAIRS: Mapping[str, Callable[[Pair], jax.Array]] = {
    "soft_ce": _soft_ce,
    "kl_div": _kl_div,
    "rkl": _rkl,
    "jsd": _jsd,
    "ce": _ce,
    "tv": _tv,
    "l1": lambda of: 2.0 * _tv(of),
    "nla": _nla,
}


def term(name: str, of: Pair, eta: float = 3.0) -> Float[Array, "*B"]:
    """Return a term per slot by its name, one of `TERMS`, "soft_ce" or "l1" (twice "tv").

    Args:
        name: which.
        of: both distributions.
        eta: of lk_hybrid.
    """
    return _lk_hybrid(of, eta) if name == "lk_hybrid" else _OF_PAIRS[name](of)


def soft_cross_entropy(
    draft: Float[Array, "*B V"], probs: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """Return `-sum p log q` for target probabilities that sum to one."""
    draft = draft.astype(jnp.float32)
    return jax.nn.logsumexp(draft, axis=-1) - jnp.sum(probs * draft, axis=-1)


def hard_cross_entropy(draft: Float[Array, "*B V"], labels: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Return `-log q[label]`."""
    draft = draft.astype(jnp.float32)
    picked = jnp.take_along_axis(draft, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(draft, axis=-1) - picked


def kl_div(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return KL(p, q)."""
    return _kl_div(pair(draft, target))


def rkl(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return KL(q, p)."""
    return _rkl(pair(draft, target))


def jsd(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return the mean of KL(p, m) and KL(q, m), m halfway between p and q."""
    return _jsd(pair(draft, target))


def ce(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return `-log q` of the target's most probable token."""
    return _ce(pair(draft, target))


def overlap(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return `sum min(p, q)`: how often a draft from q is accepted."""
    return shared(pair(draft, target))


def tv(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return the total variation distance, `1 - overlap`."""
    return _tv(pair(draft, target))


def nla(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return the negative log acceptance; below an overlap of 1e-5 it is flat."""
    return _nla(pair(draft, target))


def lk_hybrid(
    draft: Float[Array, "*B V"], target: Float[Array, "*B V"], eta: float = 3.0
) -> Float[Array, "*B"]:
    """Return `w KL(p, q) + (1 - w) tv`, `w = exp(-eta overlap)` without a gradient.

    Slots that hardly overlap learn by KL, those that do by the acceptance itself.
    """
    return _lk_hybrid(pair(draft, target), eta)


TERMS: Mapping[str, Term] = {
    "kl_div": kl_div,
    "rkl": rkl,
    "jsd": jsd,
    "ce": ce,
    "tv": tv,
    "nla": nla,
    "lk_hybrid": lk_hybrid,
}
"""Terms per slot, by the name under which recipes know them."""


def position_weights(
    kind: str, slot: Int[Array, "*B"], gamma: float = 4.0, base: float = 0.8
) -> Float[Array, "*B"]:
    """Return the weight of each slot of a block.

    Args:
        kind: "none" (1), "dflash" (0 for slot 0, then `exp(-(k - 1) / gamma)`),
            "dflash_from_anchor" (`exp(-k / gamma)`) or "exp" (`base ** k`).
        slot: index k inside the block.
        gamma: how many slots until the weight has fallen by e.
        base: of "exp".

    Raises:
        ValueError: an unknown kind.
    """
    k = slot.astype(jnp.float32)
    if kind == "none":
        return jnp.ones_like(k)
    if kind == "dflash":
        return jnp.where(slot == 0, 0.0, jnp.exp(-(k - 1.0) / gamma))
    if kind == "dflash_from_anchor":
        return jnp.exp(-k / gamma)
    if kind == "exp":
        return jnp.power(base, k)
    raise ValueError(f"position weights {kind!r}; have none, dflash, dflash_from_anchor, exp")


def dpace_weights(
    cross_entropy: Float[Array, "*B N K"], mask: Bool[Array, "*B N K"], alpha: float = 0.5
) -> Float[Array, "*B N K"]:
    """Return D-PACE's weights of the slots of a block: what each adds to the expected length.

    `s_k = (1 - alpha) exp(-ce_k) + alpha` on supervised slots and 1 elsewhere, `P_k` its running
    product, weight `mask_k sum_{j >= k} mask_j P_j`; no gradient.

    Args:
        cross_entropy: per slot, blocks on the axis before the last.
        mask: supervised slots.
        alpha: smoothing; 1 makes every slot as good as certain.
    """
    return jnp.where(mask, dpace_suffix(cross_entropy, mask, alpha), 0.0)


def dpace_suffix(
    cross_entropy: Float[Array, "*B N K"], mask: Bool[Array, "*B N K"], alpha: float = 0.5
) -> Float[Array, "*B N K"]:
    """Return `sum_{j >= k} mask_j P_j` of `dpace_weights`, unsupervised slots too."""
    kept = jnp.where(mask, jax.lax.stop_gradient(cross_entropy), 0.0)
    share = jnp.where(mask, (1.0 - alpha) * jnp.exp(-kept) + alpha, 1.0)
    reach = jnp.where(mask, jnp.cumprod(share, axis=-1), 0.0)
    return jnp.flip(jnp.cumsum(jnp.flip(reach, -1), axis=-1), -1)


def masked_sum(values: Float[Array, " ..."], mask: Bool[Array, " ..."]) -> Float[Array, ""]:
    """Sum where the mask is on; what stands elsewhere, NaN included, has no part in it."""
    return jnp.sum(jnp.where(mask, values, 0.0))


def reduce_rows(
    term: Float[Array, "B S"],
    mask: Bool[Array, "B S"],
    weights: Float[Array, "B S"] | None = None,
) -> Float[Array, ""]:
    """Return `sum(mask weight term) / (sum mask + 1e-5)` per row, averaged over rows."""
    value = jnp.where(mask, term if weights is None else term * weights, 0.0)
    return jnp.mean(value.sum(-1) / (mask.astype(jnp.float32).sum(-1) + MASK_EPSILON))


def mixture(
    terms: Mapping[str, float],
    draft: Float[Array, "B S V"],
    target: Float[Array, "B S V"],
    mask: Bool[Array, "B S"],
    weights: Float[Array, "B S"] | None = None,
) -> Float[Array, ""]:
    """Reduce each named term on its own and add them, scaled by their factors."""
    parts = (
        factor * reduce_rows(TERMS[name](draft, target), mask, weights)
        for name, factor in terms.items()
    )
    return sum(parts, jnp.zeros((), jnp.float32))


def _weighted_mean(
    values: Float[Array, " ..."],
    mask: Bool[Array, " ..."],
    weights: Float[Array, " ..."] | None,
) -> Float[Array, ""]:
    if weights is None:
        return masked_sum(values, mask) / jnp.maximum(jnp.sum(mask), 1)
    total = masked_sum(weights, mask)
    return masked_sum(weights * values, mask) / jnp.where(total > 0, total, 1.0)


def lk_alpha(
    accept: Float[Array, " ..."],
    mask: Bool[Array, " ..."],
    scale: float = 1.0,
    weights: Float[Array, " ..."] | None = None,
) -> Float[Array, ""]:
    """Return SpecForge's LK alpha loss of a step: the mean of `-log accept` over counted rows.

    A row without any overlap gives 0 and no gradient.

    Args:
        accept: overlap per row.
        mask: counted rows.
        scale: factor.
        weights: of the rows in the mean; None weighs all alike.
    """
    usable = mask & (accept > 0.0)
    logs = jnp.log(jnp.where(usable, accept, 1.0))
    return -scale * _weighted_mean(logs, mask, weights)


def lk_lambda(
    cross_entropy: Float[Array, ""],
    accept: Float[Array, " ..."],
    mask: Bool[Array, " ..."],
    kl_scale: float = 1.0,
    kl_decay: float = 3.0,
    weights: Float[Array, " ..."] | None = None,
) -> Float[Array, ""]:
    """Return SpecForge's LK lambda loss of a step, which works on the step's means.

    `w ce + (1 - w)(1 - A)` with A the mean acceptance and `w = kl_scale exp(-kl_decay A)`
    without a gradient. (`lk_hybrid` is the per-slot form of the same idea.)

    Args:
        cross_entropy: the step's mean soft cross entropy.
        accept: overlap per row.
        mask: counted rows.
        kl_scale: w at no acceptance.
        kl_decay: how fast w falls.
        weights: of the rows in the mean acceptance; None weighs all alike.
    """
    mean = _weighted_mean(accept, mask, weights)
    weight = kl_scale * jnp.exp(-kl_decay * jax.lax.stop_gradient(mean))
    return weight * cross_entropy + (1.0 - weight) * (1.0 - mean)


def binary_cross_entropy(
    logits: Float[Array, "*B"], probs: Float[Array, "*B"]
) -> Float[Array, "*B"]:
    """Return `-(y log c + (1 - y) log(1 - c))`, c = sigmoid(logits), for probabilities y."""
    logits = logits.astype(jnp.float32)
    return jax.nn.softplus(logits) - logits * jax.lax.stop_gradient(probs)
