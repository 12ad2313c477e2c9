"""Decoding with Qwen3.5: states that pads, rejected drafts and other requests never touch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import targets
from specjax.core.params import map_specs
from specjax.core.stack import ungroup
from specjax.decode import Engine, EngineConfig, Request
from specjax.decode import engine as engine_module
from specjax.targets import TargetConfig
from tests.decode.scripted import ScriptedHead

from .reference_qwen3_5 import DENSE, SPARSE, VOCAB

LENGTHS, BUDGETS, WIDTH = (9, 1, 40, 17, 3), (20, 13, 6, 21, 16), 64
LOOPED = [(DENSE, "unroll"), (SPARSE, "unroll"), (DENSE | {"full_attention_interval": 2}, "scan")]


def build(config, loop="unroll"):
    """(target, weights): norms off their start, heads that remember for dozens of tokens."""
    target = targets.from_config(config, TargetConfig(layer_loop=loop))
    rng = np.random.default_rng(7)

    def draw(spec):
        start = -3.0 if spec.hf.endswith("A_log") else float(spec.init == "ones")
        return jnp.asarray(rng.normal(start, 0.2, spec.shape), jnp.float32)

    return target, map_specs(draw, target.specs())


@functools.partial(jax.jit, static_argnums=0)
def prefill(target, params, tokens, valid):
    """(logits, the cache) of right-padded rows; nothing came before them."""
    cache = target.init_cache(*tokens.shape, dtype=params.embedding.dtype.name)
    out = target.forward(params, tokens, valid, cache)
    return target.logits(params, out.hidden), target.commit(cache, out.update, valid)


def padded_rows(rows, fill=0):
    tokens = np.full((len(rows), WIDTH), fill, np.int32)
    for to, row in zip(tokens, rows, strict=True):
        to[: len(row)] = row
    return tokens, np.asarray([len(row) for row in rows], np.int32)


def some_prompts():
    """Five prompts, told apart by their first token."""
    rng = np.random.default_rng(1)
    return [(i, *map(int, rng.integers(20, VOCAB, n - 1))) for i, n in enumerate(LENGTHS)]


def plain_answers(target, params, prompts):
    """Decode as plainly as can be: a whole pass for every token."""
    rows = list(prompts)
    for _ in range(max(BUDGETS)):
        tokens, valid = padded_rows(rows)
        best = np.asarray(prefill(target, params, tokens, valid)[0]).argmax(-1)
        rows = [(*row, int(best[b, len(row) - 1])) for b, row in enumerate(rows)]
    return [
        row[len(prompt) :][:budget]
        for row, prompt, budget in zip(rows, prompts, BUDGETS, strict=True)
    ]


def decode(target, params, prompts, answers, wrong, monkeypatch):
    """Decode in two lanes with scripted drafts; (results, each request's cache at its end).

    Prompts are padded to buckets of 16, the longest takes three chunks, and lanes are refilled.
    `wrong(i, j)` says whether the draft for token j of answer i is spoilt.
    """
    script = np.full((len(LENGTHS), 128), VOCAB - 1, np.int32)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        drafts = [(t + wrong(i, j)) % VOCAB for j, t in enumerate(answer)]
        script[i, : len(prompt) + len(answer)] = (*prompt, *drafts)
    found, collect = {}, engine_module._Run._collect

    def watched(run, state):
        done = np.asarray(state.done)
        layers = ungroup(state.cache.layers, target.config.segments)
        for lane, index in enumerate(run.lane_request):
            if index is not None and done[lane]:
                rows = jax.tree.map(lambda leaf, lane=lane: np.asarray(leaf[lane]), layers)
                found[index] = (int(state.cache.lengths[lane]), rows)
        collect(run, state)

    monkeypatch.setattr(engine_module._Run, "_collect", watched)
    settings = EngineConfig(num_speculative_tokens=4, concurrency=2, capacity=128, prefill_chunk=16)
    head = ScriptedHead(spoil=0, vocab=VOCAB)
    engine = Engine(target, params, head, jnp.asarray(script), settings, stop_ids=())
    requests = [Request(p, len(a)) for p, a in zip(prompts, answers, strict=True)]
    return engine.generate(requests), found


def check_fresh(target, params, texts, found):
    """The caches that decoding left are those of a prefill (the last token is not in either)."""
    tokens, valid = padded_rows([text[:-1] for text in texts])
    _, cache = prefill(target, params, tokens, valid)
    fresh = ungroup(cache.layers, target.config.segments)
    for b, n in enumerate(map(int, valid)):
        length, layers = found[b]
        assert length == n
        for name, got, entry in zip(target.info.layer_kinds, layers, fresh, strict=True):
            want = jax.tree.map(lambda leaf, b=b: np.asarray(leaf[b]), entry)
            if name == "recurrent":
                assert np.abs(want.state).max() > 0.1
                np.testing.assert_allclose(got.state, want.state, atol=1e-5)
                close(got.tail, want.tail)
                continue
            for left, right in ((got.k, want.k), (got.v, want.v)):
                close(left[:, :n], right[:, :n])
                assert not left[:, n:].any()  # nothing rejected was ever written


def close(got, want):
    """Half a unit in the last place of the embedding alone moves keys by up to 6e-5."""
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(("config", "loop"), LOOPED, ids=["dense", "sparse", "scanned"])
def test_rejected_drafts_leave_the_state_alone_f52(config, loop, monkeypatch):
    """F52: drafts rejected at slot 2 of 4; text and acceptance are true, the states are fresh.

    A round emits two tokens then, the first of which was drafted well.
    """
    target, params = build(config, loop)
    prompts = some_prompts()
    answers = plain_answers(target, params, prompts)
    assert len(set(answers)) == 5 and len(set(sum(answers, ()))) > 12  # no text is easy to hit
    results, found = decode(target, params, prompts, answers, lambda i, j: j % 2 == 0, monkeypatch)
    assert [r.token_ids for r in results] == answers
    # The first token comes with the prompt; the last round of 20 has no room for a draft.
    assert (results[0].rounds, results[0].accepted) == (10, (9, 0, 0, 0))
    assert all(r.accepted[1:] == (0, 0, 0) for r in results)
    check_fresh(target, params, [p + a for p, a in zip(prompts, answers, strict=True)], found)


@pytest.mark.parametrize(("config", "loop"), LOOPED[:2], ids=["dense", "sparse"])
def test_padded_prompts_and_refilled_lanes_leave_no_trace(config, loop, monkeypatch):
    """Two lanes, five prompts of other lengths, drafts spoilt at random: as one at a time."""
    target, params = build(config, loop)
    prompts = some_prompts()
    answers = plain_answers(target, params, prompts)
    spoilt = np.random.default_rng(3).random((5, 128)) < 0.3
    results, found = decode(
        target, params, prompts, answers, lambda i, j: spoilt[i, j], monkeypatch
    )
    assert [r.token_ids for r in results] == answers
    assert np.sum([r.accepted for r in results], 0).min() > 0  # rejected at any slot
    check_fresh(target, params, [p + a for p, a in zip(prompts, answers, strict=True)], found)


@pytest.mark.parametrize(("config", "loop"), LOOPED, ids=["dense", "sparse", "scanned"])
def test_what_stands_at_pads_does_not_matter(config, loop):
    target, params = build(config, loop)
    rows = some_prompts()
    (one, left), (two, right) = (
        prefill(target, params, *padded_rows(rows, fill)) for fill in (0, VOCAB - 1)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), left, right)
    for b, row in enumerate(rows):
        np.testing.assert_allclose(one[b, : len(row)], two[b, : len(row)], atol=1e-5)


def test_bfloat16_keeps_its_dtype_and_its_states_in_float32():
    target, params = build(DENSE)
    rows = padded_rows(some_prompts())
    exact, _ = prefill(target, params, *rows)
    half = map_specs(
        lambda spec, w: w if spec.dtype else w.astype(jnp.bfloat16), target.specs(), params
    )
    logits, cache = prefill(target, half, *rows)
    assert cache.layers[0].tail.dtype == cache.layers[3].k.dtype == jnp.bfloat16
    assert cache.layers[0].state.dtype == logits.dtype == jnp.float32
    real = np.arange(WIDTH) < rows[1][:, None]
    # Small networks amplify rounding; transformers' own differ as much between the two dtypes.
    assert np.abs(logits - exact)[real].mean() < 0.03 * np.abs(exact)[real].max()
