"""Finding the best setting with few runs: record once, profile, predict all, confirm the best."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specjax.decode.costs import profile as profile_passes
from specjax.decode.engine import fit_capacity
from specjax.evaluation import metrics, recording, records
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.measure import (
    Measured,
    Variant,
    baseline,
    make_engine,
    run_alternating,
    speculative,
)
from specjax.evaluation.prediction import Prediction, Profile, Setting, candidates, predict
from specjax.evaluation.report import WIDTH
from specjax.evaluation.runner import writable
from specjax.evaluation.subject import Subject, load
from specjax.evaluation.tune_config import TuneConfig, check
from specjax.evaluation.tune_report import Confirmed, Tuned, as_json, show

TUNE = "tune.json"
_DEFAULT_MOST = 8
_PROFILED = 6  # numbers of drafts that are timed; the others are interpolated


def run(config: EvalConfig, tune: TuneConfig) -> Tuned:
    """Tune what a configuration names; print what was found and write it to tune.json.

    Args:
        config: target, head, prompts and how to ask them; its num_speculative_tokens is not used.
        tune: how to look.

    Raises:
        SpecJaxError: one line, before anything is written, for anything wrong in what was given.
    """
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    check(config)
    directory = writable(config.out)
    subject = load(config)
    tuned = search(subject, config, tune, console)
    path = directory / TUNE
    content = json.dumps(as_json(tuned, subject, config, tune), indent=1, allow_nan=False)
    records.write_whole(path, content + "\n")
    show(tuned, subject, config, console)
    console.print(f"Results: {path}", highlight=False, soft_wrap=True)
    return tuned


def search(
    subject: Subject, config: EvalConfig, tune: TuneConfig, console: Console | None = None
) -> Tuned:
    """Record, profile, predict and confirm; nothing is written.

    Raises:
        PairingError: the head cannot draft that many tokens.
        DataError: no answer leaves anything to draft.
    """
    most = tune.most or subject.head.max_tokens or _DEFAULT_MOST
    capacity = config.engine.capacity or fit_capacity(subject.requests)
    timed = sorted({int(k) for k in np.linspace(1, most, min(most, _PROFILED)).round()})
    plain, *others = baseline(config, config.dtype), *_others(config)

    def variant(setting: Setting) -> Variant:
        """Return a setting's variant; the caches are of one length in all, most drafts or few."""
        k = setting.num_speculative_tokens
        found = speculative(config, subject) if k else plain
        engine = dataclasses.replace(
            found.settings,
            num_speculative_tokens=k,
            capacity=capacity + most - k,
            verification=setting.verification,
            confidence_threshold=setting.threshold,
        )
        return dataclasses.replace(found, settings=engine)

    with _progress(console) as progress:
        engines = {k: make_engine(subject, variant(Setting(k))) for k in (0, *timed)}
        confident = _confident(subject, config)
        # Made first of all: it refuses a head whose drafts nobody can be sure of.
        scheduled = (
            make_engine(subject, variant(Setting(most, "early_stop"))) if confident else None
        )
        bar = progress.add_task("recording", total=len(subject.requests))
        recorded, filled = recording.record(
            engines[most], subject.requests, confident, lambda: progress.update(bar, advance=1)
        )
        progress.update(bar, description="profile", completed=0, total=None)
        rounds = recording.time_rounds(engines, filled)
        del filled
        costs = profile_passes(scheduled, capacity) if scheduled else None
        profile = Profile(config.concurrency, rounds, costs)
        progress.update(bar, description="prediction")
        settings = candidates(most, tuple(k for k in timed if k > 1 and confident), tune.thresholds)
        predictions = tuple(predict(recorded, setting, profile) for setting in settings)
        best = sorted(predictions[1:], key=lambda p: -p.output_tokens_per_second)[: tune.confirm]
        variants = [variant(p.setting) for p in (predictions[0], *best)] + others
        passes = (len(variants) * config.repeats) * len(subject.requests)
        progress.update(bar, completed=0, total=passes)

        def advance(label: str) -> None:
            progress.update(bar, description=label, advance=0 if label == "warm-up" else 1)

        measured: list[Any] = run_alternating(subject, variants, config.repeats, advance)
    split = 1 + len(best)
    baselines = {each.variant.dtype: each for each in (measured[0], *measured[split:])}
    against = baselines[records.fastest(baselines)]
    confirmed = [
        _confirmed(p, each, against, measured[0], subject, config)
        for p, each in zip((predictions[0], *best), measured[:split], strict=True)
    ]
    medians = {d: metrics.spread(records.rates(m.passes)).median for d, m in baselines.items()}
    return Tuned(
        profile=profile,
        predictions=predictions,
        confirmed=tuple(confirmed),
        baselines={dtype: median or 0.0 for dtype, median in medians.items()},
        runs=1 + len(variants) * config.repeats,
    )


def _others(config: EvalConfig) -> list[Variant]:
    return [baseline(config, dtype) for dtype in config.baseline_dtypes if dtype != config.dtype]


def _confident(subject: Subject, config: EvalConfig) -> bool:
    """Whether drafts can be left out by confidence."""
    if getattr(subject.head, "has_confidence", False):
        return True
    argmax = config.greedy or config.engine.draft_sampling == "greedy"
    return config.engine.argmax_confidence and argmax


def _confirmed(
    prediction: Prediction,
    measured: Measured,
    against: Measured,
    same_dtype: Measured,
    subject: Subject,
    config: EvalConfig,
) -> Confirmed:
    rates = records.rates(measured.passes)
    identical = None
    if config.greedy:
        runs = [each.results for each in measured.passes]
        identical = metrics.identical(runs, same_dtype.passes[0].results, subject.groups)
    return Confirmed(
        prediction=prediction,
        output_tokens_per_second=metrics.spread(rates).median or 0.0,
        speedup=metrics.speedup(rates, records.rates(against.passes)),
        mean_acceptance_length=metrics.acceptance(measured.passes[0].results).mean_length,
        identical=identical,
    )


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=console is None,
        transient=True,
    )
