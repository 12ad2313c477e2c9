"""Every head on every family: lossless, scheduled or not, and a state that forgets rejections.

The drafts are mixed (`tests.decode.mixing`), so that in every cell some are accepted and some are
not. The whole matrix is slow:

    pytest -m slow tests/decode/test_lossless_heads.py
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import Engine, EngineConfig, Request
from specjax.decode import engine as engine_module
from specjax.decode import round as stages
from specjax.decode.costs import Costs
from tests.decode.adversary import VOCAB, tiny
from tests.decode.laws import BEHIND, SAID, SYMBOLS, check_law, sampled_texts
from tests.decode.matrix import CELLS, make
from tests.decode.mixing import Mixed, Script

NEW, LANES, CAPACITY = 160, 4, 192  # room for 20 rounds of 7 drafts
QUICK = ("gemma4", "qwen3_5")
HEADS = tuple(dict.fromkeys(head for head, _ in CELLS))


@pytest.fixture(autouse=True)
def forget_each_cell() -> Iterator[None]:
    """Drop a cell's programs: hundreds of cells map more memory than a process may.

    Compiling is all that takes time here, so it is done without most optimisations.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


def cells(*quick: str, everywhere: str = "") -> list[Any]:
    """(head, family, drafts), slow but for some heads on two families, and one on all of them."""
    return [
        pytest.param(head, family, count, marks=())
        if count == 3 and ((family in QUICK and head in quick) or head == everywhere)
        else pytest.param(head, family, count, marks=pytest.mark.slow)
        for head, family in CELLS
        for count in (1, 3, 7)
    ]


@functools.cache
def answered(family: str) -> tuple[Any, Any, list[Request], list[tuple[int, ...]], jax.Array]:
    """(target, weights, requests of uneven lengths, plain answers, texts `[N, S]`)."""
    target, params = tiny(family)
    rng = np.random.default_rng(5)
    requests = [
        Request(prompt_ids=(10 + i, *rng.integers(30, VOCAB - 1, n).tolist()), max_new_tokens=NEW)
        for i, n in enumerate((8, 15, 13, 9, 11))
    ]
    config = EngineConfig(num_speculative_tokens=0, concurrency=LANES, capacity=CAPACITY)
    plain = [r.token_ids for r in Engine(target, params, config=config).generate(requests)]
    texts = np.zeros((len(requests), CAPACITY + 16), np.int32)
    for row, request, answer in zip(texts, requests, plain, strict=True):
        text = (*request.prompt_ids, *answer)
        row[: len(text)] = text
    return target, params, requests, plain, jnp.asarray(texts)


def settings(folder: Path, num: int, rows: int = LANES, scheduled: bool = True) -> EngineConfig:
    """Return settings under which a schedule admits some drafts and not others."""
    base = EngineConfig(num_speculative_tokens=num, concurrency=rows, capacity=CAPACITY)
    if not scheduled:
        return base
    most = rows * (num + 1)
    costs = Costs(0.0, (rows, most), (1.0, 1.0 + 0.5 * num))
    costs.save(folder / "costs.json")
    return EngineConfig(
        num_speculative_tokens=num,
        concurrency=rows,
        capacity=CAPACITY,
        verification="early_stop",
        cost_table=str(folder / "costs.json"),
    )


@pytest.mark.parametrize(("name", "family", "num"), cells(*HEADS, everywhere="eagle3"))
def test_greedy_texts_are_the_baselines(name: str, family: str, num: int, tmp_path: Path) -> None:
    check_greedy(name, family, num, False, tmp_path)


@pytest.mark.parametrize(("name", "family", "num"), cells("dspark"))
def test_scheduled_greedy_texts_are_the_baselines(
    name: str, family: str, num: int, tmp_path: Path
) -> None:
    check_greedy(name, family, num, True, tmp_path)


def check_greedy(name: str, family: str, num: int, scheduled: bool, tmp_path: Path) -> None:
    target, params, requests, plain, texts = answered(family)
    inner, weights = make(name, target.info)
    head = Mixed(inner, "greedy", target.info.vocab, confident=scheduled)
    script: Any = Script(weights, texts)
    engine = Engine(target, params, head, script, settings(tmp_path, num, scheduled=scheduled))
    results = engine.generate(requests)
    assert [r.token_ids for r in results] == plain
    drafted, accepted = (sum(sum(getattr(r, n)) for r in results) for n in ("drafted", "accepted"))
    assert 0.2 < accepted / drafted < 0.8
    if not scheduled:
        check_state(engine, inner, weights, requests)


def check_state(engine: Engine, inner: Any, weights: Any, requests: list[Request]) -> None:
    """After 20 rounds of mixed drafts a head drafts as one that only saw what was accepted."""
    filled = [
        Request(prompt_ids=r.prompt_ids, max_new_tokens=CAPACITY - len(r.prompt_ids))
        for r in requests[:LANES]
    ]
    assert min(r.max_new_tokens for r in filled) > 20 * (engine.config.num_speculative_tokens + 1)
    singles = [engine.prefill(request, CAPACITY) for request in filled]
    state = jax.tree.map(lambda *rows: jnp.concatenate(rows), *singles)
    for _ in range(20):
        state, _ = engine_module._run_rounds(engine.decoder, engine.weights, state, jnp.int32(1))
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    alone = Engine(engine.decoder.target, engine.weights.target, inner, weights, engine.config)
    again = [
        alone.prefill(Request(tuple(map(int, row[: n - 1])), max_new_tokens=2), CAPACITY)
        for row, n in zip(tokens, lengths, strict=True)
    ]
    fresh = jax.tree.map(lambda *rows: jnp.concatenate(rows), *again)
    np.testing.assert_array_equal(fresh.lengths, lengths)
    propose = jax.jit(stages.propose, static_argnums=0)
    wanted = propose(alone.decoder, alone.weights, fresh)
    found = propose(alone.decoder, alone.weights, state)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    if wanted.confidence is not None:
        np.testing.assert_allclose(found.confidence, wanted.confidence, atol=1e-5)


@pytest.mark.parametrize(("name", "family", "num"), cells("dspark"))
def test_true_drafts_are_all_accepted(name: str, family: str, num: int) -> None:
    """Mean acceptance length is the drafts + 1 exactly, but for rounds that the budget cuts."""
    target, params, requests, plain, texts = answered(family)
    inner, weights = make(name, target.info)
    head: Any = Mixed(inner, "true", target.info.vocab)
    script: Any = Script(weights, texts)
    config = EngineConfig(num_speculative_tokens=num, concurrency=LANES, capacity=CAPACITY)
    results = Engine(target, params, head, script, config).generate(requests)
    assert [r.token_ids for r in results] == plain
    for result in results:
        assert result.accepted == result.drafted
        assert result.rounds == -(-(NEW - 1) // (num + 1))


@pytest.mark.parametrize(("name", "family", "num"), cells("eagle3"))
def test_samples_follow_the_law(name: str, family: str, num: int, tmp_path: Path) -> None:
    check_samples(name, family, num, False, tmp_path)


@pytest.mark.parametrize(("name", "family", "num"), cells("dspark"))
def test_scheduled_samples_follow_the_law(name: str, family: str, num: int, tmp_path: Path) -> None:
    check_samples(name, family, num, True, tmp_path)


def check_samples(name: str, family: str, num: int, scheduled: bool, tmp_path: Path) -> None:
    rows = 1000
    window = {"sliding_window": 4} if family.startswith("gemma4") else {}
    target, params = tiny(family, vocab_size=SYMBOLS, **window)
    prompt = np.random.default_rng(3).integers(0, SYMBOLS, BEHIND, dtype=np.int32)
    inner, weights = make(name, target.info)
    head: Any = Mixed(inner, "sampled", SYMBOLS, confident=scheduled)
    script: Any = Script(weights, jnp.zeros((1, BEHIND + SAID), jnp.int32))
    config = settings(tmp_path, num, rows, scheduled)
    texts, share = sampled_texts(target, params, prompt, rows, head, script, config)
    assert 0.2 < share < 0.8
    check_law(target, params, texts)


def test_confidences_of_the_head_itself_schedule_losslessly(tmp_path: Path) -> None:
    """Unmixed: what a DSpark head says of its own drafts decides what is verified."""
    target, params, requests, plain, _ = answered("gemma4")
    inner, weights = make("dspark", target.info)
    engine = Engine(target, params, inner, weights, settings(tmp_path, 3))
    results = engine.generate(requests)
    assert [r.token_ids for r in results] == plain
    drafted, rounds = sum(sum(r.drafted) for r in results), sum(r.rounds for r in results)
    assert 0 < drafted < 3 * rounds  # some were left out, not all


@pytest.mark.slow
def test_samples_under_the_heads_own_confidences_follow_the_law(tmp_path: Path) -> None:
    rows = 1000
    target, params = tiny("gemma4", vocab_size=SYMBOLS, sliding_window=4)
    prompt = np.random.default_rng(3).integers(0, SYMBOLS, BEHIND, dtype=np.int32)
    inner, weights = make("dspark", target.info)
    config = settings(tmp_path, 3, rows)
    texts, share = sampled_texts(target, params, prompt, rows, inner, weights, config)
    assert 0 < share < 1
    check_law(target, params, texts)
