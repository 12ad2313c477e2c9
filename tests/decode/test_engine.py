"""The engine: lossless, exact in its cuts, independent of neighbours, compiled once."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import targets
from specjax.core.errors import PairingError, RequestError
from specjax.decode import Engine, EngineConfig, Request
from specjax.decode import engine as engine_module
from specjax.decode.compiles import CompileClock
from tests.decode.scripted import CONFIG, VOCAB, ScriptedHead

BASE = EngineConfig(num_speculative_tokens=4, concurrency=4, capacity=128)


def run(
    target: Any,
    params: Any,
    requests: list[Request],
    head: Any = None,
    script: Any = (),
    stop_ids: Any = None,
    **changes: Any,
) -> list[Any]:
    config = dataclasses.replace(BASE, **changes)
    return Engine(target, params, head, script, config, stop_ids).generate(requests)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_greedy_is_lossless_with_spoilt_drafts(
    target: Any, params: Any, prompts: Any, baseline: Any, script: Any, concurrency: int
) -> None:
    requests = [Request(p, 40) for p in prompts]
    head = ScriptedHead()
    results = run(target, params, requests, head, script, concurrency=concurrency)
    assert [r.token_ids for r in results] == baseline
    drafted = np.sum([r.drafted for r in results], 0)
    accepted = np.sum([r.accepted for r in results], 0)
    assert 0.2 < accepted.sum() / drafted.sum() < 0.8


@pytest.mark.parametrize("k", [1, 3, 7])
def test_true_drafts_are_all_accepted(
    target: Any, params: Any, prompts: Any, baseline: Any, script: Any, k: int
) -> None:
    requests = [Request(p, 1 + 2 * (k + 1)) for p in prompts[:6]]
    head = ScriptedHead(spoil=0)
    results = run(target, params, requests, head, script, num_speculative_tokens=k)
    assert [r.token_ids for r in results] == [b[: 1 + 2 * (k + 1)] for b in baseline[:6]]
    for r in results:  # mean acceptance length is exactly k + 1
        assert (r.rounds, r.drafted, r.accepted) == (2, (2,) * k, (2,) * k)


def test_f59_no_drafts_and_a_budget_of_one(
    target: Any, params: Any, prompts: Any, baseline: Any, script: Any
) -> None:
    zero = run(
        target, params, [Request(prompts[3], 9)], ScriptedHead(), script, num_speculative_tokens=0
    )
    assert zero[0].token_ids == baseline[3][:9]
    for budget in range(1, 8):  # every way a budget can end inside a block of five
        one = run(target, params, [Request(prompts[3], budget)], ScriptedHead(spoil=0), script)
        assert one[0].token_ids == baseline[3][:budget]
        assert one[0].finish_reason == "length"
        assert sum(one[0].accepted) <= budget - 1


def test_f51_text_ends_at_a_stop_token_inside_a_block(
    target: Any, params: Any, prompts: Any, baseline: Any, script: Any
) -> None:
    for i, answer in enumerate(baseline[:4]):
        for cut in (0, 1, 2, 3, 9):
            stop = answer[cut]
            first = answer.index(stop)
            got = run(
                target,
                params,
                [Request(prompts[i], 40)],
                ScriptedHead(spoil=0),
                script,
                stop_ids=(stop,),
            )[0]
            assert got.token_ids == answer[: first + 1]
            assert got.finish_reason == "stop"
            assert sum(got.accepted) <= first


def test_refilled_lanes_leave_no_trace_and_keep_order(
    target: Any, params: Any, prompts: Any, baseline: Any, script: Any
) -> None:
    budgets = [1 + (7 * i) % 23 for i in range(len(prompts))]
    requests = [Request(p, n) for p, n in zip(prompts, budgets, strict=True)]
    seen: list[int] = []
    engine = Engine(target, params, ScriptedHead(), script, BASE)
    results = engine.generate(requests, on_result=lambda r: seen.append(r.index))
    assert [r.token_ids for r in results] == [b[:n] for b, n in zip(baseline, budgets, strict=True)]
    assert sorted(seen) == list(range(len(prompts)))
    assert [r.index for r in results] == list(range(len(prompts)))


def test_rounds_per_call_does_not_change_the_text(
    target: Any, params: Any, prompts: Any, baseline: Any, script: Any
) -> None:
    requests = [Request(p, 20) for p in prompts[:5]]
    results = run(target, params, requests, ScriptedHead(), script, rounds_per_call=1)
    assert [r.token_ids for r in results] == [b[:20] for b in baseline[:5]]


def test_f54_prompt_longer_than_a_chunk(
    target: Any, params: Any, prompts: Any, baseline: Any, script: Any
) -> None:
    requests = [Request(prompts[1], 12), Request(prompts[0], 12), Request(prompts[2], 12)]
    results = run(target, params, requests, ScriptedHead(), script, prefill_chunk=16)
    assert [r.token_ids for r in results] == [baseline[i][:12] for i in (1, 0, 2)]


def test_f60_same_prompt_twice_in_a_batch(target: Any, params: Any, prompts: Any) -> None:
    results = run(target, params, [Request(prompts[1], 30)] * 4, num_speculative_tokens=0)
    assert len({r.token_ids for r in results}) == 1


@pytest.mark.parametrize("sampled", [False, True], ids=["point-mass", "uniform-q"])
def test_f47_seeded_rows_do_not_depend_on_their_batch(
    target: Any, params: Any, prompts: Any, script: Any, sampled: bool
) -> None:
    head = ScriptedHead(sampled=sampled)
    requests = [
        Request(p, 16, temperature=t, top_k=k, top_p=tp, min_p=mp, seed=s)
        for s, (p, t, k, tp, mp) in enumerate(
            zip(
                prompts,
                (0.0, 0.5, 1.0, 1.3),
                (0, 0, 5, 0),
                (1.0, 0.9, 1.0, 1.0),
                (0.0, 0.0, 0.0, 0.1),
                strict=False,
            )
        )
    ]
    together = run(target, params, requests, head, script)
    reversed_order = run(target, params, requests[::-1], head, script)[::-1]
    alone = [run(target, params, [r], head, script)[0] for r in requests]
    texts = [r.token_ids for r in together]
    assert texts == [r.token_ids for r in reversed_order] == [r.token_ids for r in alone]


def test_f46_copies_with_distinct_seeds_differ(target: Any, params: Any, prompts: Any) -> None:
    requests = [Request(prompts[2], 12, temperature=1.0, seed=s) for s in range(16)]
    results = run(target, params, requests, num_speculative_tokens=0)
    assert len({r.token_ids for r in results}) == 16


def test_f53_idle_lanes_change_nothing(target: Any, params: Any, prompts: Any, script: Any) -> None:
    head, request = ScriptedHead(), [Request(prompts[5], 30)]
    wide = run(target, params, request, head, script, concurrency=4, num_speculative_tokens=7)
    narrow = run(target, params, request, head, script, concurrency=1, num_speculative_tokens=7)
    assert wide[0].accepted == narrow[0].accepted
    assert wide[0].drafted == narrow[0].drafted
    assert wide[0].token_ids == narrow[0].token_ids


def test_f61_one_compilation_whatever_the_requests(
    target: Any, params: Any, prompts: Any, script: Any
) -> None:
    """Twenty prompts, refills, mixed seeds and temperatures, a target loaded twice."""

    def go(where: Any, head: Any) -> None:
        requests = [
            Request(p, 5 + i % 7, temperature=(0.0, 0.7, 1.1)[i % 3], top_k=i % 4, seed=i)
            for i, p in enumerate(prompts)
        ]
        run(where, params, requests, head, script, num_speculative_tokens=5, prefill_chunk=32)

    engine_module._run_rounds.clear_cache()
    engine_module._prefill_chunk.clear_cache()
    engine_module._insert.clear_cache()
    go(target, ScriptedHead(spoil=4))
    assert engine_module._run_rounds._cache_size() == 1
    assert engine_module._insert._cache_size() == 1
    buckets = {
        engine_module.bucket(min(32, len(p) - start), 32)
        for p in prompts
        for start in range(0, len(p), 32)
    }
    assert engine_module._prefill_chunk._cache_size() <= len(buckets) == 2
    with CompileClock() as clock:
        go(targets.from_config(CONFIG), ScriptedHead(spoil=4))
    assert clock.count == 0


def test_no_transfer_inside_the_loop(target: Any, params: Any, prompts: Any) -> None:
    engine = Engine(target, params, config=dataclasses.replace(BASE, num_speculative_tokens=0))
    state = engine_module._init_state(engine.decoder, 1, 64, "float32")
    single = engine.prefill(Request(prompts[1], 8), 64)
    state = engine_module._insert(engine.decoder, state, jnp.int32(0), single)
    limit = jax.device_put(jnp.int32(4))
    with jax.transfer_guard("disallow"):
        state, ran = engine_module._run_rounds(engine.decoder, engine.weights, state, limit)
        jax.block_until_ready(state)
    assert int(ran) == 4


@pytest.mark.parametrize("k", [0, 4])
def test_caches_are_written_in_place(target: Any, params: Any, script: Any, k: int) -> None:
    """The looped program holds no second copy of a cache (a copy would slow the baseline)."""
    config = dataclasses.replace(BASE, num_speculative_tokens=k, concurrency=2, capacity=2048)
    engine = Engine(target, params, ScriptedHead(), script, config)
    state = engine_module._init_state(engine.decoder, 2, 2048, "float32")
    compiled = engine_module._run_rounds.lower(
        engine.decoder, engine.weights, state, jnp.int32(4)
    ).compile()
    room = 2048 + k + 1
    copies = re.findall(rf"= f32\[2,2,{room},8\]\S* copy\(", compiled.as_text())
    assert not copies
    one_cache = 2 * 2 * room * 8 * 4
    scores = 2 * 4 * (k + 1) * room * 4  # of one layer, before and after the exponential
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * scores + one_cache


def test_head_state_sees_exactly_what_was_committed(
    target: Any, params: Any, prompts: Any, script: Any
) -> None:
    """After many rounds the head has observed each committed pair (token, next) once, in order."""
    engine = Engine(target, params, ScriptedHead(), script, BASE)
    state = engine_module._init_state(engine.decoder, 4, 128, "float32")
    for lane in range(4):
        single = engine.prefill(Request(prompts[lane], 30), 128)
        state = engine_module._insert(engine.decoder, state, jnp.int32(lane), single)
    for _ in range(6):
        state, _ = engine_module._run_rounds(engine.decoder, engine.weights, state, jnp.int32(3))
    for lane in range(4):
        length = int(state.lengths[lane])
        assert int(state.cache.lengths[lane]) == length - 1
        ids = np.asarray(state.tokens[lane, :length])
        pairs = 1 + ids[:-1] * VOCAB + ids[1:]
        seen = np.asarray(state.head[lane])
        np.testing.assert_array_equal(seen[: length - 1], pairs)
        assert not seen[length - 1 :].any()


def test_requests_that_cannot_be_served_are_refused_before_anything_runs(
    target: Any, params: Any, prompts: Any
) -> None:
    cases = [
        (Request((), 4), "at least one prompt token"),
        (Request((1,), 0), "max_new_tokens is 0"),
        (Request((1, VOCAB), 4), f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
        (Request((1,) * 100, 29), "capacity of 128"),
        (Request((1,), 4, temperature=-1.0), "temperature is -1.0"),
        (Request((1,), 4, temperature=float("nan")), "temperature is nan"),
        (Request((1,), 4, top_p=1.5), "top_p is 1.5"),
        (Request((1,), 4, seed=2**32), "seed is 4294967296"),
    ]
    for request, words in cases:
        with pytest.raises(RequestError, match=re.escape(words)) as error:
            run(target, params, [Request((1,), 2), request])
        assert str(error.value).startswith("request 1: ")
    with pytest.raises(RequestError, match="longest context of 256"):
        run(target, params, [Request((1,) * 250, 10)], capacity=0)


def test_a_request_that_just_fits_is_served(
    target: Any, params: Any, prompts: Any, baseline: Any, script: Any
) -> None:
    prompt = prompts[1]
    got = run(
        target,
        params,
        [Request(prompt, 40)],
        ScriptedHead(spoil=0),
        script,
        capacity=len(prompt) + 40,
        num_speculative_tokens=7,
        concurrency=1,
    )
    assert got[0].token_ids == baseline[1]


@pytest.mark.parametrize(
    "name", ["repetition_penalty", "logit_bias", "logprobs", "presence_penalty"]
)
def test_f48_f50_options_we_do_not_have_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"option '{name}' is not supported"):
        Request.from_options((1,), {name: 1.0})
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        Request.from_options((1,), {"temprature": 1.0})


def test_engine_refuses_impossible_pairings(target: Any, params: Any, script: Any) -> None:
    limited = dataclasses.replace(ScriptedHead(), max_tokens=3)
    with pytest.raises(PairingError, match="drafts at most 3"):
        Engine(target, params, limited, script, BASE)
    with pytest.raises(PairingError, match="taps layers"):
        Engine(target, params, ScriptedHead(taps=(3,)), script, BASE)
    with pytest.raises(RequestError, match="concurrency is 0"):
        Engine(target, params, config=dataclasses.replace(BASE, concurrency=0))
