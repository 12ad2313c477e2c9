"""What every setting would bring, from one recorded run and a profile. Pure: nothing is run here.

A shorter round is not a longer one cut off: where it ends, the next begins, at a place where the
longer run never drafted. So the record (`evaluation.recording`) knows what a round would have
accepted at *every* place of every answer, and a setting is played on it: lanes walk over the
answers with strides of their own, are refilled from the queue as they end, and each round costs
what the profile says. For greedy requests the strides are those that the engine would make.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from specjax.decode.costs import Costs
from specjax.decode.schedule import Schedule, admit, choose_widths

Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
        num_speculative_tokens: drafts per round (K); 0 does not speculate.
        verification: which of them are verified, see `EngineConfig.verification`.
        threshold: least confidence of a draft under "threshold".
    """

    num_speculative_tokens: int
    verification: Literal["fixed", "early_stop", "threshold"] = "fixed"
    threshold: float = 0.5

    @property
    def rule(self) -> str:
        """The rule as tables show it."""
        return (
            f"threshold {self.threshold:g}"
            if self.verification == "threshold"
            else (self.verification if self.num_speculative_tokens else "-")
        )

    @property
    def overrides(self) -> str:
        """The settings of an evaluation that choose it."""
        if not self.num_speculative_tokens:
            return "Eval.head=none"
        parts = [f"Eval.num_speculative_tokens={self.num_speculative_tokens}"]
        if self.verification != "fixed":
            parts.append(f"Engine.verification={self.verification}")
        if self.verification == "threshold":
            parts.append(f"Engine.confidence_threshold={self.threshold:g}")
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What became, or would have become, of drafts at every place of every answer.

    Place t of an answer is behind its first t + 1 tokens; T is one less than the longest answer's.

    Attributes:
        tokens: `[R]` tokens of each answer, the first of which comes from prefill.
        accepted: `[R, T]` drafts accepted by a round that starts there.
        room: `[R, T]` drafts that it could verify.
        confidence: `[R, T, K]` how sure the head was of each; None where it does not say.
        prefill_seconds: taking in all prompts.
    """

    tokens: Int[np.ndarray, " R"]
    accepted: Int[np.ndarray, "R T"]
    room: Int[np.ndarray, "R T"]
    confidence: Float[np.ndarray, "R T K"] | None
    prefill_seconds: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """What rounds cost at one concurrency.

    Attributes:
        concurrency: lanes (B).
        rounds: seconds of a round that verifies all its K drafts, by K; 0 does not draft. Between
            these it is interpolated.
        costs: of drafting and of verify passes by their tokens, at the largest K; None where
            nothing is scheduled.
    """

    concurrency: int
    rounds: Mapping[int, float]
    costs: Costs | None = None

    def round_seconds(self, drafts: int, tokens: int | None = None) -> float:
        """Return the seconds of a round of `drafts` per lane that verifies `tokens` over the batch.

        A narrower pass saves what the profile of passes says, but no round is taken to cost less
        than one that does not draft.
        """
        known = sorted(self.rounds)
        full = float(np.interp(drafts, known, [self.rounds[k] for k in known]))
        if tokens is None or self.costs is None:
            return full
        most = self.concurrency * (drafts + 1)
        passes = self.costs.per_round(most)
        return max(full - float(passes[most - 1] - passes[tokens - 1]), min(full, self.rounds[0]))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a setting is expected to do on the recorded requests.

    Attributes:
        setting: the setting.
        output_tokens_per_second: generated tokens over the seconds of prefill and decoding.
        round_seconds: mean over rounds.
        rounds: how many the engine runs.
        draft_rounds: over lanes, those that verify a draft.
        accepted: `[K]` drafts accepted per position.
        verified: drafts verified.
    """

    setting: Setting
    output_tokens_per_second: float
    round_seconds: float
    rounds: int
    draft_rounds: int
    accepted: tuple[int, ...]
    verified: int

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per draft round, the bonus included; None where nothing is drafted."""
        return 1 + sum(self.accepted) / self.draft_rounds if self.draft_rounds else None

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """Accepted at each position / accepted at the one before it."""
        before = (self.draft_rounds, *self.accepted)
        return tuple(n / b if b else None for n, b in zip(self.accepted, before, strict=False))


def candidates(
    most: int, scheduled: tuple[int, ...] = (), thresholds: tuple[float, ...] = ()
) -> list[Setting]:
    """Return the settings to choose from.

    Args:
        most: largest number of drafts.
        scheduled: numbers of drafts at which rules that leave some out are looked at, too.
        thresholds: for "threshold".
    """
    found = [Setting(k) for k in range(most + 1)]
    for k in scheduled:
        found.append(Setting(k, "early_stop"))
        found += [Setting(k, "threshold", value) for value in thresholds]
    return found


def predict(recorded: Recorded, setting: Setting, profile: Profile) -> Prediction:
    """Play a setting on the record."""
    k, lanes = setting.num_speculative_tokens, profile.concurrency
    admitted_by = _rule(setting, profile)
    waiting = iter(np.flatnonzero(recorded.tokens > 1))  # others end with their first token
    answer, out = np.full(lanes, -1), np.ones(lanes, int)
    rounds = draft_rounds = verified = 0
    seconds, accepted = 0.0, np.zeros(k, int)
    while True:
        for lane in np.flatnonzero(answer < 0):
            answer[lane], out[lane] = next(waiting, -1), 1
        running = answer >= 0
        if not running.any():
            break
        row, at = np.where(running, answer, 0), out - 1
        limit = np.where(running, np.minimum(recorded.room[row, at], k), 0)
        sure = np.zeros((lanes, 0)) if recorded.confidence is None else recorded.confidence[row, at]
        admitted = admitted_by(sure, limit, running)
        left = recorded.tokens[row] - out
        kept = np.minimum(np.minimum(recorded.accepted[row, at], admitted), left)
        out = np.where(running, out + np.minimum(kept + 1, left), 1)
        accepted += (kept[:, None] > np.arange(k)).sum(axis=0)
        rounds, draft_rounds = rounds + 1, draft_rounds + int((admitted > 0).sum())
        verified += int(admitted.sum())
        tokens = None if setting.verification == "fixed" else int(running.sum() + admitted.sum())
        seconds += profile.round_seconds(k, tokens)
        answer[running & (out >= recorded.tokens[row])] = -1
    return Prediction(
        setting=setting,
        output_tokens_per_second=recorded.tokens.sum() / (recorded.prefill_seconds + seconds),
        round_seconds=seconds / max(rounds, 1),
        rounds=rounds,
        draft_rounds=draft_rounds,
        accepted=tuple(int(n) for n in accepted),
        verified=verified,
    )


_admit = functools.partial(jax.jit, static_argnums=0)(admit)


def _rule(setting: Setting, profile: Profile) -> Rule:
    """Return (confidence `[B, K]`, limit `[B]`, running `[B]`) -> drafts to verify `[B]`."""
    if setting.verification == "fixed":
        return lambda confidence, limit, running: limit
    assert profile.costs is not None
    k, lanes = setting.num_speculative_tokens, profile.concurrency
    schedule = Schedule(setting.verification, setting.threshold, choose_widths(lanes, k))
    costs = jnp.asarray(profile.costs.per_round(lanes * (k + 1)))
    before = jnp.zeros((lanes, k), jnp.float32)  # what only "budget" looks at

    def rule(confidence: np.ndarray, limit: np.ndarray, running: np.ndarray) -> np.ndarray:
        sure = confidence[:, :k].astype(np.float32)
        return np.asarray(_admit(schedule, sure, limit, running, costs, before)[0])

    return rule
