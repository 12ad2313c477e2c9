"""What tuning found: predictions beside what was measured, in a table and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.evaluation import machine, metrics
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.prediction import Prediction, Profile, Setting
from specjax.evaluation.report import WIDTH, number
from specjax.evaluation.subject import Subject
from specjax.evaluation.tune_config import TuneConfig

SCHEMA_VERSION = 1
_COLUMNS = ("tokens", "verified", "round ms", "length", "predicted")
_CONFIRMED = ("measured", "error", "speedup", "range", "length")
_SHOWN = 6  # settings of a schedule in the table; tune.json has all


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """A prediction and what was measured.

    Attributes:
        prediction: the prediction.
        output_tokens_per_second: median over repeats.
        speedup: against the fastest baseline of the same repeats.
        mean_acceptance_length: of the first repeat; None without drafts.
        identical: prompts all of whose answers are the baseline's; None when sampled.
    """

    prediction: Prediction
    output_tokens_per_second: float
    speedup: metrics.Spread
    mean_acceptance_length: float | None
    identical: int | None

    @property
    def error(self) -> float:
        """Predicted / measured throughput - 1."""
        return self.prediction.output_tokens_per_second / self.output_tokens_per_second - 1


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What tuning found.

    Attributes:
        profile: seconds of rounds.
        predictions: of all settings, the plain one first.
        confirmed: the plain setting, then the best predicted ones, best first.
        baselines: measured tokens/s without drafting, by dtype.
        runs: over all prompts; warm-ups and the profile are not among them.
    """

    profile: Profile
    predictions: tuple[Prediction, ...]
    confirmed: tuple[Confirmed, ...]
    baselines: Mapping[str, float]
    runs: int

    @property
    def fastest(self) -> Confirmed:
        """The best confirmed setting that speculates."""
        return max(self.confirmed[1:], key=lambda each: each.speedup.median or 0.0)

    @property
    def pays(self) -> bool:
        """Whether it beats the fastest baseline."""
        return (self.fastest.speedup.median or 0.0) > 1.0

    @property
    def override(self) -> str:
        """The settings to use."""
        best = self.fastest.prediction.setting if self.pays else Setting(0)
        return best.overrides


def show(tuned: Tuned, subject: Subject, config: EvalConfig, console: Console) -> None:
    """Print the table, what it rests on, and the settings to use."""
    width = min(console.width, WIDTH)

    def say(text: str) -> None:
        console.print(text, width=width, highlight=False, markup=False)

    for note in subject.notes:
        say(note)
    grid = Table(box=None, pad_edge=False, collapse_padding=True)
    for i, name in enumerate((*_COLUMNS, *_CONFIRMED)):
        grid.add_column(name, justify="left" if i == 1 else "right", no_wrap=True)
    found = {each.prediction.setting: each for each in tuned.confirmed}
    for prediction in _shown(tuned):
        grid.add_row(*_row(prediction, found.get(prediction.setting), tuned.profile))
    console.print(grid, width=width)
    longest = max(
        (p for p in tuned.predictions if p.setting.verification == "fixed"),
        key=lambda p: p.setting.num_speculative_tokens,
    )
    rates = " ".join(number(rate) for rate in longest.conditional_acceptance)
    say(f"\nAcceptance by position, given the one before it was accepted: {rates}")
    say(
        f"{len(tuned.predictions)} settings from {tuned.runs} runs over the prompts: 1 recorded,"
        f" {tuned.runs - 1} to confirm {len(tuned.confirmed) - 1} settings beside the baseline."
        " Predicted and measured are tokens/s, length is the mean acceptance length of either; a ~"
        " is interpolated between timed rounds."
    )
    prompts = len(set(subject.groups))
    differing = [
        f"{prompts - each.identical} with {each.prediction.setting.overrides}"
        for each in tuned.confirmed
        if each.identical is not None and each.identical < prompts
    ]
    if differing:
        say(
            f"Of {prompts} answers these differ from the first baseline's: {', '.join(differing)}."
            " `specjax eval` with these settings says whether at near-ties."
        )
    say(
        f"An error that all share (the baseline's is {100 * tuned.confirmed[0].error:+.0f} %)"
        " changes no order."
    )
    say(_verdict(tuned, config))
    console.print(tuned.override, highlight=False, markup=False, soft_wrap=True)


def _verdict(tuned: Tuned, config: EvalConfig) -> str:
    best = tuned.fastest
    dtype = max(tuned.baselines, key=lambda name: tuned.baselines[name])
    speedup = (
        f"{number(best.speedup.median)} ({number(best.speedup.low)} to"
        f" {number(best.speedup.high)}) of the baseline's {tuned.baselines[dtype]:,.1f} tokens/s in"
        f" {dtype}"
    )
    if not tuned.pays:
        said = (
            "Not speculating is best here: the best that was run,"
            f" {best.prediction.setting.overrides}, made {speedup}."
        )
        return said + (f" Set Eval.dtype={dtype}, and:" if dtype != config.dtype else " Use:")
    unsure = (best.speedup.low or 0.0) <= 1.0
    return f"Best: {speedup}{', within the noise of no gain at all' if unsure else ''}. Use:"


def _shown(tuned: Tuned) -> list[Prediction]:
    fixed = [p for p in tuned.predictions if p.setting.verification == "fixed"]
    others = [p for p in tuned.predictions if p.setting.verification != "fixed"]
    return fixed + sorted(others, key=lambda p: -p.output_tokens_per_second)[:_SHOWN]


def _row(prediction: Prediction, confirmed: Confirmed | None, profile: Profile) -> list[str]:
    setting = prediction.setting
    k = setting.num_speculative_tokens
    length = prediction.mean_acceptance_length
    row = [
        str(k),
        setting.rule,
        f"{'' if k in profile.rounds else '~'}{1e3 * prediction.round_seconds:,.1f}",
        "" if length is None else number(length),
        f"{prediction.output_tokens_per_second:,.1f}",
    ]
    if confirmed is None:
        return [*row, *[""] * len(_CONFIRMED)]
    spread, length = confirmed.speedup, confirmed.mean_acceptance_length
    return [
        *row,
        f"{confirmed.output_tokens_per_second:,.1f}",
        f"{100 * confirmed.error:+.0f} %",
        number(spread.median),
        f"{number(spread.low)}-{number(spread.high)}",
        "" if length is None else number(length),
    ]


def as_json(tuned: Tuned, subject: Subject, config: EvalConfig, tune: TuneConfig) -> dict[str, Any]:
    """Return what tune.json holds."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    settings = {"evaluation": dataclasses.asdict(config), "tune": dataclasses.asdict(tune)}
    return {
        "schema_version": SCHEMA_VERSION,
        "run": now,
        "target": subject.target_name,
        "head": subject.head.name,
        "head_source": subject.head_source,
        "prompts": len(set(subject.groups)),
        "prompts_sha256": subject.prompts_sha256,
        "concurrency": config.concurrency,
        "dtype": config.dtype,
        "override": tuned.override,
        "speculating_pays": tuned.pays,
        "runs": tuned.runs,
        "baseline_output_tokens_per_second": dict(tuned.baselines),
        "round_seconds": {str(k): seconds for k, seconds in tuned.profile.rounds.items()},
        "costs": None if tuned.profile.costs is None else dataclasses.asdict(tuned.profile.costs),
        "predictions": [_prediction(p) for p in tuned.predictions],
        "confirmed": [
            {
                **dataclasses.asdict(each.prediction.setting),
                "output_tokens_per_second": each.output_tokens_per_second,
                "speedup": dataclasses.asdict(each.speedup),
                "mean_acceptance_length": each.mean_acceptance_length,
                "identical": each.identical,
                "prediction_error": each.error,
            }
            for each in tuned.confirmed
        ],
        "notes": list(subject.notes),
        "machine": machine.describe(),
        "configuration": settings,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        **dataclasses.asdict(prediction.setting),
        "output_tokens_per_second": float(prediction.output_tokens_per_second),
        "round_seconds": prediction.round_seconds,
        "rounds": prediction.rounds,
        "draft_rounds": prediction.draft_rounds,
        "verified": prediction.verified,
        "accepted_per_position": list(prediction.accepted),
        "mean_acceptance_length": prediction.mean_acceptance_length,
        "acceptance_rate_per_position_conditional": list(prediction.conditional_acceptance),
    }
