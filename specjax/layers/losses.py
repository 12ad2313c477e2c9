"""Distillation losses between a draft's and a target's logits, per slot, and how they reduce.

Everything is float32. With p the target's and q the draft's distribution, `overlap` is
`sum min(p, q)`, the probability that rejection sampling accepts the draft. The terms follow
vllm-project/speculators, the losses on step means sgl-project/SpecForge; soft cross entropy is
EAGLE-3's (arXiv 2503.01840). No term carries a gradient to the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.layers import sampling

Term = Callable[[jax.Array, jax.Array], jax.Array]
_SMALLEST_OVERLAP = 1e-5
MASK_EPSILON = 1e-5
"""What speculators adds to the count of slots it divides by."""


def _log_probs(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def _pair(draft: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (log q, log p), the latter without a gradient."""
    return _log_probs(draft), jax.lax.stop_gradient(_log_probs(target))


def _divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


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
    log_q, log_p = _pair(draft, target)
    return _divergence(log_p, log_q)


def rkl(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return KL(q, p)."""
    log_q, log_p = _pair(draft, target)
    return _divergence(log_q, log_p)


def jsd(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return the mean of KL(p, m) and KL(q, m), m halfway between p and q."""
    log_q, log_p = _pair(draft, target)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * (_divergence(log_p, log_m) + _divergence(log_q, log_m))


def ce(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return `-log q` of the target's most probable token."""
    best = jnp.argmax(target, axis=-1)[..., None]
    return -jnp.take_along_axis(_log_probs(draft), best, axis=-1)[..., 0]


def overlap(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return `sum min(p, q)`: how often a draft from q is accepted."""
    log_q, log_p = _pair(draft, target)
    return sampling.overlap(jnp.exp(log_p), jnp.exp(log_q))


def tv(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return the total variation distance, `1 - overlap`."""
    return 1.0 - overlap(draft, target)


def nla(draft: Float[Array, "*B V"], target: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Return the negative log acceptance; below an overlap of 1e-5 it is flat."""
    return -jnp.log(jnp.maximum(overlap(draft, target), _SMALLEST_OVERLAP))


def lk_hybrid(
    draft: Float[Array, "*B V"], target: Float[Array, "*B V"], eta: float = 3.0
) -> Float[Array, "*B"]:
    """Return `w KL(p, q) + (1 - w) tv`, `w = exp(-eta overlap)` without a gradient.

    Slots that hardly overlap learn by KL, those that do by the acceptance itself.
    """
    shared = overlap(draft, target)
    weight = jnp.exp(-eta * jax.lax.stop_gradient(shared))
    return weight * kl_div(draft, target) + (1.0 - weight) * (1.0 - shared)


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


def lk_alpha(
    accept: Float[Array, " ..."], mask: Bool[Array, " ..."], scale: float = 1.0
) -> Float[Array, ""]:
    """Return SpecForge's LK alpha loss of a step: the mean of `-log accept` over counted rows.

    A row without any overlap gives 0 and no gradient.
    """
    usable = mask & (accept > 0.0)
    logs = jnp.log(jnp.where(usable, accept, 1.0))
    return -scale * jnp.sum(logs) / jnp.maximum(jnp.sum(mask), 1)


def lk_lambda(
    cross_entropy: Float[Array, ""],
    accept: Float[Array, " ..."],
    mask: Bool[Array, " ..."],
    kl_scale: float = 1.0,
    kl_decay: float = 3.0,
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
    """
    mean = masked_sum(accept, mask) / jnp.maximum(jnp.sum(mask), 1)
    weight = kl_scale * jnp.exp(-kl_decay * jax.lax.stop_gradient(mean))
    return weight * cross_entropy + (1.0 - weight) * (1.0 - mean)


def binary_cross_entropy(
    logits: Float[Array, "*B"], probs: Float[Array, "*B"]
) -> Float[Array, "*B"]:
    """Return `-(y log c + (1 - y) log(1 - c))`, c = sigmoid(logits), for probabilities y."""
    logits = logits.astype(jnp.float32)
    return jax.nn.softplus(logits) - logits * jax.lax.stop_gradient(probs)
