"""Predictions on records made by hand, where the right answer is known without a model."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.decode.costs import Costs
from specjax.evaluation.prediction import Profile, Recorded, Setting, candidates, predict


def recorded(
    texts: list[list[int]], most: int, confidence: np.ndarray | None = None, prefill: float = 0.0
) -> Recorded:
    """A record of answers, given the drafts accepted at each of their places."""
    longest = max(map(len, texts))
    accepted, room = np.zeros((2, len(texts), longest), int)
    for i, text in enumerate(texts):
        accepted[i, : len(text)] = text
        room[i, : len(text)] = np.minimum(most, np.arange(len(text))[::-1])
    return Recorded(
        tokens=np.asarray([1 + len(text) for text in texts]),
        accepted=np.minimum(accepted, room),
        room=room,
        confidence=confidence,
        prefill_seconds=prefill,
    )


def test_rounds_realign_where_they_end() -> None:
    """By hand: strides from places 0..7, which a longer run cut off would not show."""
    text = [3, 0, 0, 2, 9, 0, 1, 0]  # 9 tokens; the first from prefill
    record = recorded([text], 4, prefill=1.0)
    profile = Profile(1, {0: 1.0, 4: 3.0})
    plain = predict(record, Setting(0), profile)
    assert (plain.rounds, plain.draft_rounds, plain.mean_acceptance_length) == (8, 0, None)
    assert plain.output_tokens_per_second == pytest.approx(9 / (1 + 8))
    # 4 drafts: place 0 takes 3 + 1, place 4 takes 3 (its room) + 1: the end.
    four = predict(record, Setting(4), profile)
    assert (four.rounds, four.accepted) == (2, (2, 2, 2, 0))
    assert four.output_tokens_per_second == pytest.approx(9 / (1 + 2 * 3.0))
    # 1 draft: 0 -> 2 -> 3 -> 5 -> 6 -> 8. The first rounds' counts cut at 1 would have said 2.
    one = predict(record, Setting(1), profile)
    assert (one.rounds, one.draft_rounds, one.accepted) == (5, 5, (3,))
    assert one.mean_acceptance_length == pytest.approx(1.6)
    assert one.round_seconds == pytest.approx(1.5)  # a quarter of the way from 1 to 3
    assert four.conditional_acceptance == (1.0, 1.0, 1.0, 0.0)


def test_lanes_are_refilled_as_they_end() -> None:
    # Answers of 1, 5, 3 and 3 tokens on two lanes: 4 rounds, 2 + 2 beside them, 1 without any.
    record = recorded([[], [0] * 4, [0] * 2, [0] * 2], 2)
    found = predict(record, Setting(2), Profile(2, {0: 1.0, 2: 2.0}))
    assert found.rounds == 4
    assert found.output_tokens_per_second == pytest.approx((1 + 5 + 3 + 3) / 8)
    # A lane more does not help: the longest answer is the end.
    assert predict(record, Setting(2), Profile(3, {0: 1.0, 2: 2.0})).rounds == 4
    assert predict(record, Setting(2), Profile(1, {0: 1.0, 2: 2.0})).rounds == 8


@pytest.mark.parametrize(
    ("rate", "per_draft", "best"), [(0.8, 0.05, 7), (0.8, 0.2, 4), (0.8, 1.0, 0), (0.3, 0.2, 1)]
)
def test_finds_the_optimum_of_a_coin(rate: float, per_draft: float, best: int) -> None:
    """Each draft is right with one probability: throughput has a closed form, and an optimum."""
    most = 7
    rng = np.random.default_rng(0)
    right = rng.random((40, 500, most)) < rate
    accepted = np.cumprod(right, axis=2).sum(axis=2)
    record = recorded([list(row) for row in accepted], most)
    seconds = {k: 1 + per_draft * k for k in range(most + 1)}

    def true(k: int) -> float:
        return sum(rate**i for i in range(k + 1)) / seconds[k]

    assert max(range(most + 1), key=true) == best
    found = [predict(record, s, Profile(1, seconds)) for s in candidates(most)]
    for k, each in enumerate(found):
        assert each.output_tokens_per_second == pytest.approx(true(k), rel=0.02)
    assert max(found, key=lambda p: p.output_tokens_per_second).setting == Setting(best)


def test_schedules_leave_out_what_the_head_is_not_sure_of() -> None:
    """A head that knows: it verifies no draft in vain, and pays for the narrow pass alone."""
    most, places = 3, 300
    rng = np.random.default_rng(1)
    accepted = rng.integers(0, most + 1, places)
    sure = np.where(np.arange(most) < accepted[:, None], 0.95, 0.05)[None]
    record = recorded([list(accepted)], most, confidence=sure)
    # Each token of a pass costs a second, drafting half a one.
    costs = Costs(0.5, (1, 4), (1.0, 4.0))
    profile = Profile(1, {0: 1.0, 3: 4.5}, costs)
    fixed = predict(record, Setting(3), profile)
    for setting in (Setting(3, "threshold", 0.5), Setting(3, "threshold", 0.9)):
        found = predict(record, setting, profile)
        assert found.rounds == fixed.rounds
        assert found.accepted == fixed.accepted
        assert found.verified == sum(found.accepted)
        mean = 1.5 + found.verified / found.rounds
        assert found.round_seconds == pytest.approx(mean, rel=1e-3)
    strict = predict(record, Setting(3, "threshold", 0.99), profile)
    assert (strict.verified, strict.mean_acceptance_length) == (0, None)
    assert strict.round_seconds == pytest.approx(1.5)
    stopping = predict(record, Setting(3, "early_stop"), profile)
    assert stopping.output_tokens_per_second > fixed.output_tokens_per_second
    # A narrow pass is never taken to cost less than a round without drafts.
    steep = Profile(1, {0: 1.0, 3: 2.0}, costs)
    assert steep.round_seconds(3, 1) == 1.0
    assert steep.round_seconds(3, 4) == 2.0


def test_overrides_are_what_the_command_line_takes() -> None:
    assert Setting(0).overrides == "Eval.head=none"
    assert Setting(3).overrides == "Eval.num_speculative_tokens=3"
    assert Setting(5, "threshold", 0.7).overrides == (
        "Eval.num_speculative_tokens=5 Engine.verification=threshold"
        " Engine.confidence_threshold=0.7"
    )
    rules = [(s.num_speculative_tokens, s.rule) for s in candidates(2, (2,), (0.5,))]
    assert rules == [
        (0, "-"),
        (1, "fixed"),
        (2, "fixed"),
        (2, "early_stop"),
        (2, "threshold 0.5"),
    ]
