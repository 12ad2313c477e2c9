"""Acceptance by position: what rounds bring, and what cannot be meant."""

import json
from pathlib import Path

import pytest

from specjax.core.errors import ConfigError, DataError
from specjax.evaluation import records
from specjax.planner.acceptance import Acceptance, read


def test_tokens_per_round() -> None:
    given = Acceptance((0.8, 0.4), "given")
    assert given.tokens(0) == 1.0
    assert given.tokens(1) == pytest.approx(1.8)
    assert given.tokens(2) == pytest.approx(2.2)
    # Half of the drafts stand that come behind one that did, so a third does in 0.2 of rounds.
    assert given.tokens(3) == pytest.approx(2.4)
    assert Acceptance((0.5,), "given").tokens(3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert Acceptance((0.0, 0.0), "given").tokens(4) == 1.0


@pytest.mark.parametrize("text", ["0.8,0.6", "0.8 0.6", "(0.8, 0.6)"])
def test_rates_are_read(text: str) -> None:
    found = read(text, "eagle3")
    assert found is not None and found.rates == (0.8, 0.6)
    assert read("", "eagle3") is None


@pytest.mark.parametrize("text", ["0.6,0.8", "1.2", "-0.1", "nan", ","])
def test_rates_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"Plan\.acceptance"):
        read(text, "eagle3")


def test_results_of_an_evaluation(tmp_path: Path) -> None:
    def row(head: str, k: int, rates: list[float]) -> dict:
        every = dict.fromkeys(records._EVERY)
        return every | {
            "schema_version": records.SCHEMA_VERSION,
            "head": head,
            "num_speculative_tokens": k,
            "acceptance_rate_per_position": rates,
            "prompts": 32,
            "prompts_source": "gsm8k",
            "temperature": 0.0,
        }

    rows = [row("none", 0, []), row("eagle3", 2, [0.7, 0.5]), row("eagle3", 4, [0.7, 0.5, 0.3])]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = read(str(tmp_path), "eagle3")
    assert found is not None
    assert found.rates == (0.7, 0.5, 0.3)
    assert "32 prompts of gsm8k" in found.source
    with pytest.raises(DataError, match="no record of a dflash head"):
        read(str(tmp_path), "dflash")
    with pytest.raises(DataError, match="no results"):
        read(str(tmp_path / "nothing"), "dflash")
