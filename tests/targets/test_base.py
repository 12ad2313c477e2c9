"""The five functions of a target: ragged rows, chunks, commits, taps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import targets
from specjax.core.params import init_params
from specjax.decode import Engine, EngineConfig, Request

CAPACITY = 40


def build(family, layers=3):
    config = {
        "model_type": family,
        "vocab_size": 61,
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "attention_bias": True,
    }
    target = targets.from_config(config)
    return target, init_params(target.specs(), jax.random.key(3), scale=0.4)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request):
    return build(request.param)


@functools.partial(jax.jit, static_argnums=(0, 5))
def run(target, params, tokens, valid, cache, taps=()):
    out = target.forward(params, tokens, valid, cache, taps)
    return out, target.logits(params, out.hidden)


@functools.partial(jax.jit, static_argnums=0)
def commit(target, cache, update, n):
    return target.commit(cache, update, n)


def texts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 61, n) for n in lengths]


def padded(rows, fill=0, width=0):
    out = np.full((len(rows), max(width, *map(len, rows))), fill, np.int32)
    for row, text in zip(out, rows, strict=True):
        row[: len(text)] = text
    return jnp.asarray(out), jnp.asarray([len(text) for text in rows])


def close(got, want):
    assert got.shape == want.shape
    if not want.size:
        return
    np.testing.assert_allclose(got, want, atol=2e-6 * max(5.0, np.abs(want).max()), rtol=0)


def all_taps(target):
    return tuple(range(target.info.num_layers + 1))


@pytest.mark.parametrize("fill", [0, 17])
def test_ragged_batch_equals_single_runs_f15(model, fill):
    """States, taps and logits of lengths 5, 11, 3 together, twice, are those one by one."""
    target, params = model
    rows = texts(5, 11, 3)
    taps = all_taps(target)
    singles = [run(target, params, *padded([row], width=11), None, taps) for row in rows]
    for _ in range(2):
        out, logits = run(target, params, *padded(rows, fill), None, taps)
        for b, (row, (alone, alone_logits)) in enumerate(zip(rows, singles, strict=True)):
            n = len(row)
            close(out.hidden[b, :n], alone.hidden[0, :n])
            close(out.taps[:, b, :n], alone.taps[:, 0, :n])
            close(logits[b, :n], alone_logits[0, :n])


@pytest.mark.parametrize("chunk", [4, 7])
def test_chunked_prefill_of_ragged_rows_f54(model, chunk):
    """A prompt longer than one chunk beside a short one: every state as in one pass."""
    target, params = model
    rows = texts(13, 3, 8, seed=1)
    tokens, lengths = padded(rows)
    tokens = jnp.pad(tokens, ((0, 0), (0, chunk)))
    whole, _ = run(target, params, *padded(rows), None, ())
    cache = target.init_cache(len(rows), CAPACITY)
    for start in range(0, int(lengths.max()), chunk):
        piece = tokens[:, start : start + chunk]
        valid = jnp.clip(lengths - start, 0, chunk)
        out, _ = run(target, params, piece, valid, cache, ())
        cache = commit(target, cache, out.update, valid)
        for b, n in enumerate(np.asarray(valid)):
            close(out.hidden[b, :n], whole.hidden[b, start : start + n])
    np.testing.assert_array_equal(cache.lengths, lengths)


def test_engine_in_chunks_beside_a_short_prompt_f54():
    """The engine draws only when a prompt is complete; both texts are those of single runs."""
    target, params = build("llama", layers=1)
    prompts = texts(40, 3, seed=2)
    requests = [Request(tuple(map(int, p)), max_new_tokens=6) for p in prompts]
    chunked = Engine(target, params, config=EngineConfig(concurrency=2, prefill_chunk=16))
    together = [r.token_ids for r in chunked.generate(requests)]
    whole = Engine(target, params, config=EngineConfig(concurrency=2, prefill_chunk=64))
    assert together == [whole.generate([r])[0].token_ids for r in requests]
    assert all(len(ids) == 6 for ids in together)


@pytest.mark.parametrize("seed", range(3))
def test_partial_commits_among_garbage_equal_a_fresh_prefill(model, seed):
    """What is not committed leaves no trace: not in states, not in keys, not in lengths."""
    target, params = model
    rng = np.random.default_rng(seed)
    width, rows = 5, texts(30, 30, 30, seed=seed)
    cache, done = target.init_cache(3, CAPACITY), np.zeros(3, int)
    for _ in range(6):
        n = np.minimum(rng.integers(0, width + 1, 3), 25 - done)
        tokens = rng.integers(0, 61, (3, width))
        for b in range(3):
            tokens[b, : n[b]] = rows[b][done[b] : done[b] + n[b]]
        out, _ = run(target, params, jnp.asarray(tokens), jnp.full(3, width), cache, ())
        cache = commit(target, cache, out.update, jnp.asarray(n))
        done += n
    np.testing.assert_array_equal(cache.lengths, done)
    # The next five true tokens see what a prefill of everything before them gives.
    following = np.stack([row[d : d + width] for row, d in zip(rows, done, strict=True)])
    got, logits = run(target, params, jnp.asarray(following), jnp.full(3, width), cache, ())
    fresh, fresh_logits = run(target, params, *padded(rows), None, ())
    for b, d in enumerate(done):
        close(logits[b], fresh_logits[b, d : d + width])
        close(got.hidden[b], fresh.hidden[b, d : d + width])
        for entry, (k, v) in zip(cache.layers, fresh.update, strict=True):
            close(entry.k[b, :, :d], k[b, :, :d])
            close(entry.v[b, :, :d], v[b, :, :d])
            assert np.all(np.asarray(entry.k[b, :, d:]) == 0)  # garbage was never written


def test_commit_of_nothing_is_a_no_op(model):
    target, params = model
    tokens, valid = padded(texts(6, 4))
    out, _ = run(target, params, tokens, valid, target.init_cache(2, CAPACITY), ())
    cache = commit(target, target.init_cache(2, CAPACITY), out.update, valid)
    again = commit(target, cache, out.update, jnp.zeros(2, int))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), cache, again))


def test_forward_only_reads_and_an_empty_cache_is_no_cache(model):
    target, params = model
    tokens, valid = padded(texts(6, 4))
    cache = target.init_cache(2, CAPACITY)
    with_cache, _ = run(target, params, tokens, valid, cache, (1,))
    without, _ = run(target, params, tokens, None, None, (1,))
    close(with_cache.taps, without.taps)
    assert all(not leaf.any() for leaf in jax.tree.leaves(cache))


def test_taps_come_in_the_order_asked_for(model):
    target, params = model
    tokens, valid = padded(texts(4))
    every, _ = run(target, params, tokens, valid, None, all_taps(target))
    some, _ = run(target, params, tokens, valid, None, (3, 0, 3))
    np.testing.assert_array_equal(some.taps, every.taps[jnp.asarray([3, 0, 3])])
    np.testing.assert_array_equal(every.taps[0], target.embed(params, tokens))
    none, _ = run(target, params, tokens, valid, None, ())
    assert none.taps.shape == (0, 1, 4, 20)


def test_taps_show_the_layer_they_name(model):
    """F2's trick: a constant added to the output of layer i appears in taps i + 1 and later."""
    target, params = model
    tokens, valid = padded(texts(4))
    before, _ = run(target, params, tokens, valid, None, all_taps(target))
    layers = list(params.layers)
    down = layers[1].mlp.down
    layers[1] = layers[1].replace(
        mlp=layers[1].mlp.replace(down_bias=jnp.full(down.shape[0], 10.0))
    )
    after, _ = run(
        target, params.replace(layers=tuple(layers)), tokens, valid, None, all_taps(target)
    )
    np.testing.assert_array_equal(after.taps[:2], before.taps[:2])
    np.testing.assert_allclose(after.taps[2], before.taps[2] + 10, atol=1e-4)


def test_taps_outside_the_layers_are_refused(model):
    target, params = model
    for tap in (-1, target.info.num_layers + 1):
        with pytest.raises(ValueError, match=r"outside 0\.\.3"):
            target.forward(params, jnp.zeros((1, 2), int), taps=(tap,))


def test_bfloat16_keeps_its_dtype_and_gives_float32_logits(model):
    target, params = model
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens, valid = padded(texts(4))
    out, logits = run(target, half, tokens, valid, target.init_cache(1, 8, "bfloat16"), (1,))
    assert out.hidden.dtype == out.taps.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    _, exact = run(target, params, tokens, valid, None, (1,))
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()
