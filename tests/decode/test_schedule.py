"""Scheduled verification: the law does not bend, the widths are few, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import ConfigError, PairingError, RequestError
from specjax.decode import Engine, EngineConfig, Request
from specjax.decode import round as stages
from specjax.decode.compiles import CompileClock
from specjax.decode.costs import Costs, read_costs
from specjax.decode.schedule import Schedule, choose_widths
from specjax.heads.base import Borrowed, DraftContext, NullHead, Proposal
from specjax.heads.ngram import NgramHead
from specjax.heads.small_model import SmallModelHead
from specjax.layers.sampling import PURPOSE_DRAFT, Sampling, draw
from specjax.targets.base import Family, Target, TargetInfo, TargetOut
from specjax.verify import schedule as rules
from tests.decode.adversary import VOCAB, Adversary, Traps, _Forgetful, tiny, trap

P, Q = jnp.asarray([0.7, 0.3]), jnp.asarray([0.5, 0.5])


def _forward(
    params: Any,
    config: Any,
    tokens: Any,
    valid: Any,
    cache: Any,
    taps: Any,
    packing: Any = None,
    documents: Any = None,
    layout: Any = None,
) -> TargetOut:
    shape = tokens.shape if packing is None else (1, packing.rows.shape[0])
    return TargetOut(jnp.zeros((*shape, 1)), jnp.zeros((0, *shape, 1)), ())


def _logits(params: Any, config: Any, hidden: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.log(P), (*hidden.shape[:-1], 2))


def _info(config: Any) -> TargetInfo:
    return TargetInfo("constant", 1, 2, 0, (), (), 64)


def _nothing(*args: Any) -> tuple[()]:
    return ()


def _table(params: Any, config: Any) -> jax.Array:
    return params.embedding


@dataclasses.dataclass
class _Params:
    embedding: Any


jax.tree_util.register_dataclass(_Params, ["embedding"], [])

# A target that says token 0 with probability 0.7 whatever it read.
CONSTANT = Target(
    Family(
        read_config=_nothing,
        info=_info,
        specs=_nothing,
        init_cache=_nothing,
        forward=_forward,
        commit=_nothing,
        logits=_logits,
        embed=_nothing,
        output_weights=_table,
        entry=_nothing,
        ignored=_nothing,
    ),
    None,
)


@dataclasses.dataclass(frozen=True)
class Oracle(_Forgetful):
    """DRAFTS section 7's head: sure of its second draft if and only if the first was token 0."""

    has_confidence: ClassVar[bool] = True

    def propose(
        self, params: Any, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        logits = jnp.broadcast_to(jnp.log(Q), (context.anchor.shape[0], 2))
        slots = [
            draw(logits, context.sampling, context.lengths + k, PURPOSE_DRAFT + k)
            for k in range(num)
        ]
        tokens, probs = (jnp.stack(parts, axis=1) for parts in zip(*slots, strict=True))
        second = jnp.where(tokens[:, 0] == 0, 0.9, 0.0)
        confidence = jnp.stack([jnp.full_like(second, 0.8), second], axis=1)
        return Proposal(tokens=tokens, probs=probs, confidence=confidence)


def first_tokens(kind: str, steps_per_second: list[float], draws: int) -> np.ndarray:
    """The first token of one scheduled round, for `draws` seeds."""
    schedule = Schedule(kind, 0.5, (1, 2, 3))
    decoder = stages.Decoder(CONSTANT, Oracle(), 2, (), schedule=schedule)
    costs = 1.0 / jnp.asarray(steps_per_second)
    weights = stages.Weights(_Params(jnp.zeros((2, 1))), (), costs)

    def one(seed: jax.Array) -> jax.Array:
        state = stages.init_state(decoder, 1, 16, "float32")
        state = state.replace(
            lengths=jnp.ones(1, jnp.int32),
            budget=jnp.full(1, 9),
            done=jnp.zeros(1, bool),
            sampling=Sampling.of(1, temperature=1.0, seed=seed),
            survival=jnp.asarray([[0.8, 0.4]]),
        )
        return stages.one_round(decoder, weights, state).tokens[0, 1]

    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(draws, dtype=jnp.uint32)))


TABLES = {"stops": [1.0, 0.5, 0.45], "goes_on": [1.0, 0.9, 0.8], "free": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize("kind", ["early_stop", "budget", "threshold"])
@pytest.mark.parametrize("table", list(TABLES))
def test_no_schedule_bends_the_law(kind: str, table: str) -> None:
    """100,000 rounds: the first token is the target's, within four standard deviations."""
    draws = 100_000
    share = np.mean(first_tokens(kind, TABLES[table], draws) == 0)
    assert abs(share - 0.7) < 4 * np.sqrt(0.7 * 0.3 / draws)


def test_a_scheduler_that_peeks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best point of the whole path knows draft 1 before it is admitted: 0.85, not 0.7."""

    def peeking(survival: jax.Array, steps: jax.Array, anchors: jax.Array) -> jax.Array:
        del anchors
        gains = jnp.cumsum(survival[0])
        path = jnp.concatenate([steps[:1], (1.0 + gains) * steps[1:]])
        return jnp.argmax(path)[None]

    monkeypatch.setattr(rules, "early_stop", peeking)
    share = np.mean(first_tokens("early_stop", TABLES["stops"], 100_000) == 0)
    assert abs(share - 0.85) < 0.01


@dataclasses.dataclass(frozen=True)
class Unsure(_Forgetful):
    """The adversary, with confidences of its own: a hash of place and slot."""

    has_confidence: ClassVar[bool] = True

    def propose(
        self, params: Any, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        drafts = Adversary().propose(params, borrowed, state, context, num)
        at = context.lengths[:, None] * 31 + jnp.arange(num) * 17 + context.anchor[:, None]
        return drafts.replace(confidence=0.3 + 0.7 * (at * 7919 % 101) / 101)


@functools.cache
def scripted(family: str) -> tuple[Any, Any, list[Request], list[Any], Traps]:
    """A target, requests of uneven lengths, their plain answers, and drafts to trip it with."""
    target, params = tiny(family)
    rng = np.random.default_rng(2)
    requests = [
        Request(prompt_ids=(10 + i, *rng.integers(3, VOCAB, n).tolist()), max_new_tokens=24)
        for i, n in enumerate((4, 13, 1, 8, 6, 2))
    ]
    plain = Engine(target, params).generate(requests)
    size = max(len(r.prompt_ids) for r in requests) + 32
    script = np.zeros((len(requests), size), np.int32)
    for row, request, answer in zip(script, requests, plain, strict=True):
        text = (*request.prompt_ids, *answer.token_ids)
        row[: len(text)] = text
    drafts = trap(script, 5, rng)
    return target, params, requests, plain, Traps(jnp.asarray(script[:, 0]), jnp.asarray(drafts))


def costs_file(folder: Path, widths: tuple[int, ...], slope: float = 0.002) -> str:
    Costs(0.001, widths, tuple(0.01 + slope * w for w in widths)).save(folder / "costs.json")
    return str(folder / "costs.json")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "budget"),
        ("qwen3", "threshold"),
        ("qwen3_5", "early_stop"),
        ("gemma4_e", "early_stop"),
        ("deepseek_v3", "early_stop"),
        ("qwen3_moe", "early_stop"),
    ],
)
def test_lossless_on_packed_widths(family: str, kind: str, tmp_path: Path) -> None:
    target, params, requests, plain, traps = scripted(family)
    config = EngineConfig(
        num_speculative_tokens=5,
        concurrency=4,
        verification=kind,
        cost_table=costs_file(tmp_path, (4, 24)),
        confidence_threshold=0.6,
    )
    found = Engine(target, params, Unsure(), traps, config).generate(requests)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    drafted, accepted = (sum(sum(getattr(r, n)) for r in found) for n in ("drafted", "accepted"))
    rounds = sum(r.rounds for r in found)
    assert 0.05 * rounds < drafted < 0.95 * 5 * rounds
    assert 0.2 < accepted / drafted < 0.8


def test_one_program_however_many_widths_are_used(tmp_path: Path) -> None:
    target, params, requests, _, traps = scripted("llama")
    config = EngineConfig(
        num_speculative_tokens=5,
        concurrency=2,
        capacity=64,
        verification="early_stop",
        cost_table=costs_file(tmp_path, (2, 12)),
        verify_widths=(4, 8),
    )
    engine = Engine(target, params, Unsure(), traps, config)
    assert engine.decoder.schedule is not None and engine.decoder.schedule.widths == (4, 8, 12)
    engine.generate(requests)
    with CompileClock() as clock:
        engine.generate(requests[::-1])
    assert clock.count == 0


def test_argmax_probability_stands_in_where_it_is_asked_for(tmp_path: Path) -> None:
    """A chain head without confidences: off by default, and never for sampled drafts."""
    target, params, requests, plain, _ = scripted("llama")
    model, small = tiny("llama", seed=9)
    base = EngineConfig(
        num_speculative_tokens=3,
        concurrency=2,
        verification="early_stop",
        cost_table=costs_file(tmp_path, (2, 8)),
    )
    with pytest.raises(PairingError, match="gives no confidences"):
        Engine(target, params, SmallModelHead(model), small, base)
    config = dataclasses.replace(base, argmax_confidence=True)
    engine = Engine(target, params, SmallModelHead(model), small, config)
    assert [r.token_ids for r in engine.generate(requests)] == [r.token_ids for r in plain]
    sampled = [dataclasses.replace(requests[0], temperature=1.0)]
    with pytest.raises(RequestError, match="argmax drafts alone"):
        engine.generate(sampled)
    greedy = dataclasses.replace(config, draft_sampling="greedy")
    (result,) = Engine(target, params, SmallModelHead(model), small, greedy).generate(sampled)
    assert len(result.token_ids) == 24
    with pytest.raises(PairingError, match="no probabilities"):
        Engine(target, params, NgramHead(), (), config)


def test_profile_prices_every_width() -> None:
    target, params, requests, _, traps = scripted("llama")
    config = EngineConfig(num_speculative_tokens=5, concurrency=2, verification="early_stop")
    engine = Engine(target, params, Unsure(), traps, config)
    engine.generate(requests[:2])
    assert engine.costs is not None and engine.costs.widths == choose_widths(2, 5)
    table = np.asarray(engine.weights.costs)
    assert table.shape == (12,) and (np.diff(table) >= 0).all() and (table > 0).all()


def test_the_null_head_needs_no_schedule() -> None:
    target, params, requests, plain, _ = scripted("llama")
    config = EngineConfig(num_speculative_tokens=0, verification="early_stop")
    found = Engine(target, params, NullHead(), (), config).generate(requests[:1])
    assert found[0].token_ids == plain[0].token_ids


def test_widths() -> None:
    assert choose_widths(1, 7) == (1, 4, 6, 8)
    assert choose_widths(8, 7) == (8, 27, 46, 64)
    assert choose_widths(4, 1) == (4, 6, 7, 8)
    assert choose_widths(2, 5, (8, 4, 4)) == (4, 8, 12)
    for wrong in ((1,), (13,), (3, 4, 5, 6)):
        with pytest.raises(ConfigError, match=r"Engine\.verify_widths"):
            choose_widths(2, 5, wrong)


def test_cost_tables(tmp_path: Path) -> None:
    costs = Costs(0.5, (2, 4), (3.0, 1.0))  # noise: more tokens for less
    np.testing.assert_allclose(costs.per_round(5), [3.5, 3.5, 3.5, 3.5, 3.5])
    np.testing.assert_allclose(Costs(0, (1, 3), (1.0, 2.0)).per_round(3), [1, 1.5, 2])
    costs.save(tmp_path / "c.json")
    assert read_costs(tmp_path / "c.json") == costs
    (tmp_path / "d.json").write_text(json.dumps({"draft": 1}))
    for name in ("d.json", "none.json"):
        with pytest.raises(ConfigError, match=rf"Engine\.cost_table .*{name}"):
            read_costs(tmp_path / name)
    with pytest.raises(ConfigError, match="ascending"):
        Costs(0.0, (4, 2), (1.0, 1.0))
