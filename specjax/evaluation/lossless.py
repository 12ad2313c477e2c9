"""Were the greedy texts the same, and is every difference an argmax tie within rounding?

Verifying K + 1 rows at once rounds otherwise than one row does, so a narrow dtype can flip an
argmax between two nearly equal logits. A difference is not excused by its dtype: each is looked
at where it first occurs, with logits of the target computed anew over the common text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import hosts
from specjax.decode.engine import bucket
from specjax.decode.requests import Request, Result
from specjax.targets.base import Target

PyTree = Any

# Largest gap below the best logit at which a flip counts as a near-tie, as a fraction of that
# logit: rounding errors grow with what is rounded. 2^-6 is four steps of bfloat16's significand; on
# a model of 30 layers, logits of 20 computed at two widths differ by up to 0.3.
TIE_BOUND = {"float32": 2.0**-14, "bfloat16": 2.0**-6}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where a text leaves the baseline's.

    Attributes:
        request: which request.
        position: index among the generated tokens.
        tokens: (the baseline's token, the other run's); -1 where that text had ended.
        logits: of these two tokens, computed anew in the run's dtype over the common text.
        margin: the best logit there less the smaller of the two.
        near_tie: whether the margin is at most the bound times the best logit's magnitude.
    """

    request: int
    position: int
    tokens: tuple[int, int]
    logits: tuple[float, float]
    margin: float
    near_tie: bool


def first_difference(reference: Result, other: Result) -> int | None:
    """Return the index of the first generated token that differs, None for equal texts."""
    if reference.token_ids == other.token_ids:
        return None
    shorter = min(len(reference.token_ids), len(other.token_ids))
    pairs = zip(reference.token_ids[:shorter], other.token_ids[:shorter], strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(target: Target, params: PyTree, tokens: jax.Array, count: jax.Array) -> jax.Array:
    out = target.forward(params, tokens, count)
    last = jnp.take_along_axis(out.hidden, count[:, None, None] - 1, axis=1)[:, 0]
    return target.logits(params, last)[0]


def logits_after(target: Target, params: PyTree, ids: Sequence[int]) -> np.ndarray:
    """Return the float32 logits `[V]` that follow a text, from one pass without a cache."""
    tokens = np.zeros((1, bucket(len(ids), 1 << 30)), np.int32)
    tokens[0, : len(ids)] = ids
    logits = _last_logits(target, params, tokens, np.asarray([len(ids)], np.int32))
    return np.asarray(hosts.fetch(logits))


def differences(
    target: Target,
    params: PyTree,
    dtype: str,
    requests: Sequence[Request],
    reference: Sequence[Result],
    other: Sequence[Result],
) -> list[Difference]:
    """Explain every greedy text of `other` that differs from the baseline's.

    Args:
        target: the target.
        params: its weights, in the dtype of both runs.
        dtype: that dtype; it chooses the bound.
        requests: what both runs answered.
        reference: the baseline's results.
        other: the other run's.
    """
    found = []
    for request, base, result in zip(requests, reference, other, strict=True):
        at = first_difference(base, result)
        if at is None:
            continue
        a, b = (r.token_ids[at] if at < len(r.token_ids) else -1 for r in (base, result))
        logits = logits_after(target, params, request.prompt_ids + base.token_ids[:at])
        both = tuple(float(logits[i]) if i >= 0 else float("-inf") for i in (a, b))
        margin = float(logits.max()) - min(both)
        found.append(
            Difference(
                request=base.index,
                position=at,
                tokens=(a, b),
                logits=(both[0], both[1]),
                margin=margin,
                near_tie=margin <= TIE_BOUND[dtype] * abs(float(logits.max())),
            )
        )
    return found


def tokens_compared(reference: Sequence[Result], other: Sequence[Result]) -> int:
    """Count tokens up to and including each first difference: the base of the flip rate."""
    total = 0
    for base, result in zip(reference, other, strict=True):
        at = first_difference(base, result)
        total += len(base.token_ids) if at is None else at + 1
    return total
