"""Decoding in the loop, and the checkpoint it chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax.core.errors import DataError
from specjax.data.chat import Encoded
from specjax.decode import Engine, EngineConfig
from specjax.heads.base import borrow
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.targets.base import Target
from specjax.training.decoding import Probe, opening
from specjax.training.logging import Display
from specjax.training.trainer import Trainer
from tests.training import toy

Loaded = tuple[Target, Any]


def test_opening_ends_where_the_assistant_speaks() -> None:
    ids = np.arange(3, 8, dtype=np.int32)
    assert opening(Encoded(ids, np.array([0, 0, 1, 0, 1], bool))) == (3, 4)
    assert opening(Encoded(ids, np.array([1, 0, 1, 0, 1], bool))) == ()
    assert opening(Encoded(ids, np.zeros(5, bool))) == ()


def test_probe_needs_held_out_prompts(tmp_path: Path, target: Loaded) -> None:
    config = toy.make_config(tmp_path, decode_every=2)
    assert Probe.of(toy.make_config(tmp_path), target[0], toy.ToyHead(), ()) is None
    begins = Encoded(np.arange(3, 8, dtype=np.int32), np.ones(5, bool))
    with pytest.raises(DataError, match=r"set Data\.holdout"):
        Probe.of(config, target[0], toy.ToyHead(), (begins,))


def test_measures_what_the_texts_say(tmp_path: Path, target: Loaded) -> None:
    """Rounds and tokens counted from the texts alone agree with the length that is reported."""
    model, weights = target
    block = model.info.draft_block
    assert block is not None
    head = Eagle3Head.for_target(model.info, block, Eagle3Config(taps=(1, 2, 3), mlp=16))
    params = head.init(jax.random.key(0), borrow(model, weights))
    config = toy.make_config(
        tmp_path, decode_every=1, decode_prompts=3, decode_tokens=24, num_speculative_tokens=3
    )
    probe = Probe.of(config, model, head, toy.make_rows(5))
    assert probe is not None and len(probe.requests) == 3
    found = probe.measure(weights, params)
    plain = Engine(model, weights, config=EngineConfig()).generate(probe.requests)
    decoded = Engine(model, weights, head, params, probe.engine).generate(probe.requests)
    assert [r.token_ids for r in decoded] == [r.token_ids for r in plain]
    rounds = sum(r.rounds for r in decoded)
    made = sum(len(r.token_ids) - 1 for r in decoded)  # the first comes from the prompt's pass
    # The last round of a text may have given more than fitted.
    assert made / rounds <= found["decoded_mean_acceptance_length"] <= (made + 3) / rounds
    np.testing.assert_allclose(
        1 + found["decoded_reach"].sum(), found["decoded_mean_acceptance_length"]
    )
    assert len(found["decoded_reach"]) == 3


class Scripted:
    """A probe that measures what it is told, and remembers the weights it was given."""

    def __init__(self, lengths: dict[int, float], run: Trainer) -> None:
        self.lengths, self.run = lengths, run
        self.seen: dict[int, Any] = {}

    def measure(self, target_params: Any, params: Any) -> dict[str, Any]:
        del target_params
        step = int(self.run.state.step)
        self.seen[step] = jax.device_get(params)
        return {"decoded_mean_acceptance_length": self.lengths[step]}


class Crashing(Display):
    def step(self, step: int) -> None:
        if step == 7:
            raise RuntimeError("crash")


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_exports_the_best_by_decoding(tmp_path: Path, target: Loaded, ema: float) -> None:
    """The best of steps 2 to 8 is 4: kept though newer ones come, known to a resumed run."""
    lengths = {2: 1.2, 4: 1.9, 6: 1.5, 8: 1.9}
    config = toy.make_config(
        tmp_path, decode_every=2, save_every=1, keep=1, seed=3, ema=ema, decode_tokens=8
    )
    heldout = toy.make_batches(toy.make_rows(5, seed=9), batch_size=2)

    def make() -> tuple[Trainer, Scripted]:
        head = toy.ToyHead()
        object.__setattr__(head, "max_tokens", None)
        run = Trainer(config, *target, head, head.init(), toy.make_batches(), heldout)
        run.probe = probe = Scripted(lengths, run)  # type: ignore[assignment]
        return run, probe

    run, first = make()
    with pytest.raises(RuntimeError, match="crash"):
        run.run(Crashing(8))
    kept = Path(config.out) / "checkpoints"
    assert sorted(p.name for p in kept.iterdir()) == ["4", "6"]
    run, second = make()
    outcome = run.run()
    assert (outcome.steps, outcome.best.step) == (8, 4) and set(second.seen) == {8}
    assert sorted(p.name for p in kept.iterdir()) == ["4", "8"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(outcome.params), first.seen[4])
    assert not np.array_equal(first.seen[4]["w"], second.seen[8]["w"])
    log = [json.loads(x) for x in (Path(config.out) / "train.jsonl").read_text().splitlines()]
    found = {r["step"]: r.get("decoded_mean_acceptance_length") for r in log}
    assert {step: value for step, value in found.items() if value} == lengths
