"""The whole command on a tiny target, what it says, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specjax import tune as door
from specjax.core.errors import ConfigError, PairingError
from specjax.evaluation import tune
from specjax.evaluation.config import EvalConfig
from specjax.evaluation.metrics import spread
from specjax.evaluation.prediction import Prediction, Profile, Setting
from specjax.evaluation.subject import Subject
from specjax.evaluation.tune_config import TuneConfig, check
from specjax.evaluation.tune_report import Confirmed, Tuned, show


def test_tunes_a_tiny_target(
    subject: Subject, config: EvalConfig, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    """2 of 3 drafts are right: acceptance is known, and every figure is in its place."""
    monkeypatch.setattr(tune, "load", lambda _: subject)
    config = dataclasses.replace(config, repeats=1, out=str(tmp_path / "out"))
    tuned = tune.run(config, TuneConfig(most=3, confirm=2))
    assert [p.setting for p in tuned.predictions] == [Setting(k) for k in range(4)]
    lengths = [p.mean_acceptance_length for p in tuned.predictions]
    assert lengths == [None, 2.0, 3.0, 3.0]
    assert tuned.confirmed[0].prediction.setting == Setting(0)
    assert len(tuned.confirmed) == 3
    for each in tuned.confirmed[1:]:
        assert each.mean_acceptance_length == each.prediction.mean_acceptance_length
        assert each.identical == 4
    assert tuned.runs == 1 + 4  # recorded; two baselines and two settings once each
    assert tuned.baselines.keys() == {"float32", "bfloat16"}

    (path,) = (tmp_path / "out").iterdir()
    written = json.loads(path.read_text())
    assert path.name == "tune.json"
    assert written["override"] == tuned.override
    assert [p["num_speculative_tokens"] for p in written["predictions"]] == [0, 1, 2, 3]
    assert [c["prediction_error"] for c in written["confirmed"]] == [
        pytest.approx(each.error) for each in tuned.confirmed
    ]
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed[:-1])) <= 100
    assert tuned.override in printed
    assert any("1 recorded, 4 to confirm 2 settings" in line for line in printed)


def tuned_of(*speedups: tuple[float, float]) -> Tuned:
    """Two confirmed settings of 2 and 3 drafts, and a baseline of 100 tokens/s."""
    predictions = tuple(Prediction(Setting(k), 100.0, 0.01, 9, 9, (1,) * k, 9) for k in (0, 2, 3))
    confirmed = [Confirmed(predictions[0], 100.0, spread([1.0]), None, 4)]
    for p, ratios in zip(predictions[1:], speedups, strict=True):
        rate = 100 * sum(ratios) / 2
        confirmed.append(Confirmed(p, rate, spread(ratios), 1.5, 4))
    rounds = {k: 0.01 for k in (0, 2, 3)}
    baselines = {"float32": 80.0, "bfloat16": 100.0}
    return Tuned(Profile(1, rounds), predictions, tuple(confirmed), baselines, 13)


@pytest.mark.parametrize(
    ("speedups", "override", "words"),
    [
        (((1.2, 1.4), (1.5, 1.7)), "Eval.num_speculative_tokens=3", "Best: 1.60 (1.50 to 1.70)"),
        (((0.9, 1.2), (0.5, 0.7)), "Eval.num_speculative_tokens=2", "noise of no gain"),
        (
            ((0.7, 0.9), (0.5, 0.7)),
            "Eval.head=none",
            "Not speculating is best here: the best that was run, Eval.num_speculative_tokens=2,"
            " made 0.80 (0.70 to 0.90) of the baseline's 100.0 tokens/s in bfloat16. Set"
            " Eval.dtype=bfloat16, and:",
        ),
    ],
)
def test_ends_with_what_to_use(
    subject: Subject, config: EvalConfig, speedups: Any, override: str, words: str
) -> None:
    text = io.StringIO()
    show(tuned_of(*speedups), subject, config, Console(file=text, width=100))
    assert text.getvalue().splitlines()[-1] == override
    assert words in " ".join(text.getvalue().split())


def test_refuses_what_leaves_nothing_to_tune(config: EvalConfig) -> None:
    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            check(dataclasses.replace(config, **changes))

    check(config)
    refused("nothing to tune without a draft head", head="none")
    refused("Eval.head lists several", head="a,b")
    refused("Eval.prompts lists several", prompts="a,b")
    refused("max_new_tokens is 1", max_new_tokens=1)
    scheduled = dataclasses.replace(config.engine, verification="budget")
    refused("Engine.verification is set", engine=scheduled)
    for bad in ({"most": -1}, {"confirm": 0}, {"thresholds": (0.5, 1.0)}):
        with pytest.raises(ConfigError, match=r"Tune\."):
            TuneConfig(**bad)


def test_more_drafts_than_the_head_has(subject: Subject, config: EvalConfig) -> None:
    with pytest.raises(PairingError, match="drafts at most 7"):
        tune.search(subject, config, TuneConfig(most=8))


def test_mistakes_are_one_line(tmp_path: Path, capsys: Any) -> None:
    words = ["--target", str(tmp_path / "no"), "--head", "ngram", "--prompts", str(tmp_path / "p")]
    out = ["--out", str(tmp_path / "out")]
    for more in (["Tune.confirm=0"], ["--sweep=a=1"], [], ["Eval.max_new_tokens=1"]):
        assert door.main([*words, *out, *more]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
