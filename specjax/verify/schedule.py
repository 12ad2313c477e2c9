"""Which drafts to verify when a head says how sure it is of each: the rules, as arrays in and out.

Confidence c_j of a row is the estimated probability that its draft j is accepted given that those
before it were, so `a_j = c_1 ... c_j` is the probability that draft j comes to anything. Every row
verifies its anchor whatever happens; drafts are admitted over the whole batch in descending
survival a, ties by smaller position and then by smaller row. Since a never rises along a row,
what is admitted of a row is a prefix.

Speculative sampling stays lossless only if draft j is admitted without knowing draft j. c_j may
depend on drafts 1 .. j - 1, so c_{j+1} knows draft j, and no rule may look deeper into a row than
the draft it decides on: `early_stop` and `admit_top` under a number fixed beforehand do not, nor
does `above_threshold`. `global_argmax` does; it is lossless only where confidences do not depend
on the drafts of their own round (DSpark paper, arXiv 2607.05147, section 5.2 and appendix A).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def survival(confidence: Float[Array, "R K"], open_: Bool[Array, "R K"]) -> Float[Array, "R K"]:
    """Return the products of each row's confidences so far, 0 from its first closed slot on.

    Args:
        confidence: of each draft, given those before it.
        open_: drafts that may be verified at all.
    """
    # Left to right, not by jnp.cumprod: its tree of products may round so that a deeper value
    # comes out above the one before. For the same reason no factor may exceed one.
    factors = jnp.where(open_, jnp.clip(confidence.astype(jnp.float32), 0.0, 1.0), 0.0)
    products, reach = [], jnp.ones(factors.shape[:1], jnp.float32)
    for k in range(factors.shape[1]):
        reach = reach * factors[:, k]
        products.append(reach)
    return jnp.stack(products, axis=1) if products else factors


def above_threshold(confidence: Float[Array, "R K"], threshold: float) -> Int[Array, " R"]:
    """Return how many drafts stand before the first whose own confidence is below `threshold`."""
    kept = jnp.cumprod((confidence >= threshold).astype(jnp.int32), axis=1)
    return jnp.sum(kept, axis=1)


def early_stop(
    survival: Float[Array, "R K"],
    steps_per_second: Float[Array, " M"],
    anchors: Int[Array, ""] | int,
) -> Int[Array, " R"]:
    """Admit one draft after another while each raises the expected tokens per second.

    Stops at the first admission that does not (equality stops), and at the end of the table. What
    comes behind that point has no influence, which is what keeps it lossless.

    Args:
        survival: see `survival`; zeros are no candidates.
        steps_per_second: entry i: verify passes per second at i + 1 tokens.
        anchors: rows that take part; each counts as a token that is certain.

    Returns:
        Drafts to verify per row.
    """
    path = throughput(survival, steps_per_second, anchors)
    rising = jnp.cumprod((path[1:] > path[:-1]).astype(jnp.int32))
    return admit_top(survival, jnp.sum(rising))


def global_argmax(
    survival: Float[Array, "R K"],
    steps_per_second: Float[Array, " M"],
    anchors: Int[Array, ""] | int,
) -> Int[Array, " R"]:
    """Admit up to the best point of the whole path (the first, on a tie).

    Arguments and result as of `early_stop`. Not lossless where confidences know drafts of their
    own round; see above.
    """
    return admit_top(survival, jnp.argmax(throughput(survival, steps_per_second, anchors)))


def throughput(
    survival: Float[Array, "R K"],
    steps_per_second: Float[Array, " M"],
    anchors: Int[Array, ""] | int,
) -> Float[Array, " N+1"]:
    """Return the expected tokens per second with the 0, 1, .. N = R K best drafts admitted.

    -inf where there is no such candidate (its survival is 0) or the table ends.
    """
    found = jnp.flip(jnp.sort(survival.reshape(-1))) > 0
    path = _path(survival, steps_per_second, anchors, 0)
    return path.at[1:].set(jnp.where(found, path[1:], -jnp.inf))


def objective(
    survival: Float[Array, "R K"],
    costs: Float[Array, " M"],
    anchors: Int[Array, ""] | int,
    other: Int[Array, ""] | int = 0,
) -> Float[Array, " N+1"]:
    """Return the expected tokens per unit of cost with the 0, 1, .. N = R K best drafts admitted.

    Args:
        survival: see `survival`.
        costs: entry i: cost of a round (drafting and all) that verifies i + 1 tokens.
        anchors: rows that take part.
        other: tokens of the pass that are not speculative: they cost, and bring nothing here.

    Returns:
        -inf where the table ends.
    """
    return _path(survival, 1.0 / costs, anchors, other)


def best_budget(
    survival: Float[Array, "R K"],
    costs: Float[Array, " M"],
    anchors: Int[Array, ""] | int,
    other: Int[Array, ""] | int = 0,
) -> Int[Array, ""]:
    """Return the number of drafts at which `objective` is greatest (the first, on a tie).

    Lossless if `survival` is of an earlier round, with `admit_top` on that of the present one.
    """
    return jnp.argmax(objective(survival, costs, anchors, other)).astype(jnp.int32)


def admit_top(survival: Float[Array, "R K"], number: Int[Array, ""] | int) -> Int[Array, " R"]:
    """Return drafts per row when the `number` best of the batch are admitted; zeros never are.

    The rank of a draft cannot depend on what was drafted there: the deeper ones, which know, come
    behind it whatever their values.
    """
    rows, drafts = survival.shape
    # Position-major, so that a stable sort breaks ties by position and then by row.
    flat = survival.T.reshape(-1)
    order = jnp.argsort(-flat, stable=True)
    taken = (jnp.arange(rows * drafts) < number) & (flat[order] > 0)
    lengths = jnp.zeros((rows,), jnp.int32)
    return lengths.at[order % max(rows, 1)].add(taken.astype(jnp.int32))


def _path(
    survival: Float[Array, "R K"],
    per_second: Float[Array, " M"],
    anchors: Int[Array, ""] | int,
    other: Int[Array, ""] | int,
) -> Float[Array, " N+1"]:
    """Return (anchors + sum of the m largest) * per_second[anchors + other + m tokens]."""
    best = jnp.flip(jnp.sort(survival.reshape(-1))).astype(jnp.float32)
    gains = jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(best)])
    at = anchors + other + jnp.arange(gains.shape[0]) - 1
    size = per_second.shape[0]
    rate = (anchors + gains) * per_second[jnp.clip(at, 0, size - 1)]
    return jnp.where(at < size, rate, -jnp.inf)
