"""Differences are found where they start, and excused only under the stated bound."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.requests import Result
from specjax.evaluation import lossless
from specjax.evaluation.subject import Subject


def answer(*tokens: int) -> Result:
    return Result(0, tokens, "length", 1, (), (), 0.0, 1.0)


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 4, 3), 1), ((1, 2), (1, 2, 3), 2)],
)
def test_first_difference(a: tuple[int, ...], b: tuple[int, ...], at: int | None) -> None:
    assert lossless.first_difference(answer(*a), answer(*b)) == at


def test_tokens_compared_ends_at_the_first_difference() -> None:
    base = [answer(1, 2, 3), answer(1, 2, 3)]
    assert lossless.tokens_compared(base, [answer(1, 2, 3), answer(1, 9, 9)]) == 3 + 2


def test_logits_after_a_text_do_not_see_the_padding(subject: Subject) -> None:
    ids = subject.requests[1].prompt_ids
    params = subject.params["float32"]
    out = subject.target.forward(params, jnp.asarray([ids]))
    expected = subject.target.logits(params, out.hidden)[0, -1]
    np.testing.assert_allclose(
        lossless.logits_after(subject.target, params, ids), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("gap", [0.05, 0.3])
def test_margin_decides_what_a_near_tie_is(subject: Subject, gap: float) -> None:
    """F62: both logits and the margin are reported; only a small margin is called a near-tie."""
    request = subject.requests[0]
    params = subject.params["float32"]
    base, other = 7, 9
    # Rows of the tied output layer such that token 9 lies `gap` below token 7, the best.
    out = subject.target.forward(params, jnp.asarray([request.prompt_ids]))
    h = out.hidden[0, -1]
    scores = jnp.full((subject.target.info.vocab,), -20.0).at[base].set(10.0)
    scores = scores.at[other].set(10.0 - gap)
    untied = dataclasses.replace(subject.target.config, tied=False)
    target = dataclasses.replace(subject.target, config=untied)
    output = jnp.outer(scores, h) / jnp.sum(h * h)
    weights = jax.tree.map(lambda leaf: leaf, params).replace(output=output)
    found = lossless.differences(
        target, weights, "bfloat16", [request], [answer(base, 1)], [answer(other, 1)]
    )
    assert len(found) == 1
    assert found[0].tokens == (base, other)
    assert found[0].position == 0
    assert found[0].logits == pytest.approx((10.0, 10.0 - gap), abs=1e-3)
    assert found[0].margin == pytest.approx(gap, abs=1e-3)
    assert found[0].near_tie == (gap <= 10.0 / 64)


def test_a_text_that_goes_on_after_the_other_ended_is_never_a_tie(subject: Subject) -> None:
    found = lossless.differences(
        subject.target,
        subject.params["float32"],
        "float32",
        subject.requests[:1],
        [answer(1, 2)],
        [answer(1, 2, 3)],
    )
    assert found[0].tokens == (-1, 3)
    assert not found[0].near_tie
