"""EAGLE-3 as a draft head: rounds, cache, recycled states, draft vocabularies, sampling."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import PairingError
from specjax.heads.base import Borrowed
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head, Eagle3State
from specjax.heads.eagle3.network import (
    Eagle3Weights,
    draft_logits,
    fuse,
    layer_inputs,
    layer_output,
)
from specjax.heads.vocabulary import kept_ids, vocabulary_maps
from specjax.layers.attention import KeyBlock, causal_mask
from specjax.layers.sampling import Sampling
from tests.heads.eagle3 import cases

KEPT = np.sort(np.random.default_rng(1).permutation(cases.VOCAB)[:12])


@pytest.mark.parametrize("name", ["eagle3_llama", "eagle3_qwen3"])
def test_two_rounds_agree_with_the_reference(name: str) -> None:
    case = cases.case(name)
    x, head = case.tensors, case.head
    drafts, prompt = x["infer.round1.tokens"].shape[1], len(x["infer.context_ids"])
    accepted = int(x["infer.accepted"])
    observe = cases.jit(head.observe)

    @cases.jit
    def draft(state: Eagle3State) -> tuple[jax.Array, ...]:
        proposal, outs, logits = head.draft(
            case.params, case.borrowed, state, cases.context(state), drafts
        )
        return jnp.stack(outs, 1), jnp.stack(logits, 1), proposal.tokens

    def check(round_name: str, state: Eagle3State) -> np.ndarray:
        for part, value in zip(("hidden", "logits", "tokens"), draft(state), strict=True):
            if f"infer.{round_name}.{part}" in x:
                cases.agree(f"{round_name}.{part}", value, x[f"infer.{round_name}.{part}"])
        return np.asarray(value)

    after = jnp.asarray([*x["infer.context_ids"][1:], x["infer.anchor"]])[None]
    context = case.taps(x["infer.context_hidden"])
    first = observe(
        case.params,
        case.borrowed,
        head.init_state(1, 64),
        cases.observation(after, context, [prompt], [0]),
    )
    tokens = check("round1", first)
    # Accepted drafts, then the bonus; what follows in the window was rejected and must not count.
    window = np.append(tokens, 0)
    window[accepted] = x["infer.bonus"]
    verified = case.taps(x["infer.verify_hidden"])
    second = observe(
        case.params,
        case.borrowed,
        first,
        cases.observation(jnp.asarray(window)[None], verified, [accepted + 1], [prompt]),
    )
    check("round2", second)
    whole = observe(
        case.params,
        case.borrowed,
        head.init_state(1, 64),
        cases.observation(
            jnp.concatenate([after, jnp.asarray(window)[None]], 1),
            jnp.concatenate([context, verified], 2),
            [prompt + accepted + 1],
            [0],
        ),
    )
    check("round2_nocache", whole)


def uncached_chain(
    head: Eagle3Head,
    params: Eagle3Weights,
    borrowed: Borrowed,
    taps: jax.Array,
    tokens: jax.Array,
    drafts: int,
) -> tuple[jax.Array, jax.Array]:
    """Draft greedily, all pairs anew for each draft: (target ids `[B, K]`, logits)."""
    states, picked, seen = fuse(head, params, taps), [], []
    kept = kept_ids(params)
    for _ in range(drafts):
        length = tokens.shape[1]
        at = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        residual, q, k, v = layer_inputs(head, params, borrowed, states, tokens, at)
        blocks = [KeyBlock(k, v, causal_mask(length))]
        last = layer_output(head, params, residual, q, blocks)[:, -1:]
        seen.append(draft_logits(head, params, borrowed, last)[:, 0])
        best = jnp.argmax(seen[-1], -1)
        picked.append(best if kept is None else kept[best])
        states = jnp.concatenate([states, last], axis=1)
        tokens = jnp.concatenate([tokens, picked[-1][:, None]], axis=1)
    return jnp.stack(picked, 1), jnp.stack(seen, 1)


@pytest.mark.parametrize("kept", [None, KEPT], ids=["F9-full", "F9-draft-vocab"])
def test_a_chain_of_four_equals_a_plain_loop_without_cache(kept: np.ndarray | None) -> None:
    head, params, borrowed = cases.tiny(kept)
    batch = cases.tiny_batch([9, 9], 9)
    state = cases.jit(head.observe)(
        params,
        borrowed,
        head.init_state(2, 16),
        cases.observation(batch.tokens, batch.taps, [9, 9], [0, 0]),
    )
    proposal, _, logits = cases.jit(partial(head.draft, num=4))(
        params, borrowed, state, cases.context(state)
    )
    tokens, expected = cases.jit(partial(uncached_chain, head, drafts=4))(
        params, borrowed, batch.taps, batch.tokens
    )
    np.testing.assert_array_equal(proposal.tokens, tokens)
    np.testing.assert_allclose(jnp.stack(logits, 1), expected, rtol=1e-4, atol=1e-4)
    assert len(np.unique(tokens)) > 1


@pytest.mark.parametrize("everything", [False, True], ids=["random", "all-accepted"])
def test_the_state_after_twenty_rounds_equals_one_from_scratch(everything: bool) -> None:
    head, params, borrowed = cases.tiny(KEPT)
    rng = np.random.default_rng(5)
    width, window, rows = 112, 5, 3
    batch = cases.tiny_batch([width] * rows, width)
    observe = cases.jit(head.observe)
    state = head.init_state(rows, width)
    at = np.zeros(rows, int)
    for _ in range(20):
        count = rng.integers(0, window + 1, rows) if not everything else np.full(rows, window)
        columns = at[:, None] + np.arange(window)
        tokens = np.take_along_axis(np.asarray(batch.tokens), columns, 1)
        taps = np.take_along_axis(np.asarray(batch.taps), columns[None, :, :, None], 2)
        rejected = np.arange(window) >= count[:, None]
        tokens = np.where(rejected, rng.integers(0, cases.VOCAB, tokens.shape), tokens)
        taps = np.where(rejected[None, :, :, None], 1e3, taps)
        seen = cases.observation(jnp.asarray(tokens), jnp.asarray(taps), count, at)
        before, state = state, observe(params, borrowed, state, seen)
        idle = count == 0
        np.testing.assert_array_equal(state.hidden[idle], before.hidden[idle])
        at = at + count
        np.testing.assert_array_equal(state.lengths, at)
    whole = cases.observation(batch.tokens, batch.taps, at, [0] * rows)
    fresh = observe(params, borrowed, head.init_state(rows, width), whole)
    np.testing.assert_allclose(state.hidden, fresh.hidden, rtol=1e-4, atol=1e-4)
    for row, length in enumerate(at):
        for name in ("k", "v"):
            ours, theirs = (getattr(s.cache, name)[row, :, :length] for s in (state, fresh))
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert at.min() > 20


def observed(kept: np.ndarray | None = KEPT, rows: int = 2, **config: object) -> tuple:
    head, params, borrowed = cases.tiny(kept, **config)
    batch = cases.tiny_batch([6] * rows, 6)
    seen = cases.observation(batch.tokens, batch.taps, [6] * rows, [0] * rows)
    state = cases.jit(head.observe)(params, borrowed, head.init_state(rows, 12), seen)
    return head, params, borrowed, state


def test_zero_and_one_draft() -> None:
    head, params, borrowed, state = observed()
    none = head.propose(params, borrowed, state, cases.context(state), 0)
    assert none.tokens.shape == (2, 0)
    propose = cases.jit(head.propose, static_argnums=4)
    one = propose(params, borrowed, state, cases.context(state), 1)
    two = propose(params, borrowed, state, cases.context(state), 2)
    np.testing.assert_array_equal(one.tokens[:, 0], two.tokens[:, 0])
    assert one.probs.shape == (2, 1, cases.VOCAB)


def test_sampled_rows_draw_from_what_they_report_and_greedy_rows_do_not() -> None:
    head, params, borrowed, state = observed(rows=2)
    sampling = Sampling.of(2, temperature=jnp.asarray([0.0, 1.5]), seed=jnp.asarray([1, 2]))
    draft = cases.jit(partial(head.draft, num=3))
    got, _, logits = draft(params, borrowed, state, cases.context(state, sampling))
    probs = np.asarray(got.probs)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
    outside = np.setdiff1d(np.arange(cases.VOCAB), KEPT)
    assert not probs[..., outside].any()
    np.testing.assert_allclose(
        probs[1][:, KEPT], jax.nn.softmax(jnp.stack(logits, 1)[1] / 1.5), rtol=1e-5
    )
    assert np.isin(got.tokens, KEPT).all()
    np.testing.assert_array_equal(got.tokens[0], KEPT[np.argmax(jnp.stack(logits, 1)[0], -1)])


def test_greedy_drafts_are_point_masses_in_sampled_rows_too() -> None:
    head, params, borrowed, state = observed(greedy_drafts=True)
    hot = Sampling.of(2, temperature=3.0, seed=4)
    propose = cases.jit(partial(head.propose, num=3))
    got = propose(params, borrowed, state, cases.context(state, hot))
    cold = propose(params, borrowed, state, cases.context(state))
    assert got.probs is None
    np.testing.assert_array_equal(got.tokens, cold.tokens)


def test_bfloat16_keeps_logits_in_float32() -> None:
    head, params, borrowed, _ = observed()

    def half(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    params, borrowed = jax.tree.map(half, (params, borrowed))
    batch = cases.tiny_batch([6], 6)
    seen = cases.observation(batch.tokens, half(batch.taps), [6], [0])
    state = cases.jit(head.observe)(params, borrowed, head.init_state(1, 12, "bfloat16"), seen)
    assert state.cache.k.dtype == jnp.bfloat16
    draft = cases.jit(partial(head.draft, num=2))
    _, outs, logits = draft(params, borrowed, state, cases.context(state))
    assert {x.dtype for x in outs} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in logits} == {jnp.dtype(jnp.float32)}


def test_a_fresh_head_starts_with_the_targets_output_rows() -> None:
    head, params, borrowed = cases.tiny(KEPT)
    np.testing.assert_array_equal(params.output, borrowed.output[KEPT])
    np.testing.assert_array_equal(kept_ids(params), KEPT)
    which = head.trainable()
    assert which.output and which.fc and not which.d2t and not which.t2d
    assert params.embedding is None
    full, params, borrowed = cases.tiny(None)
    np.testing.assert_array_equal(params.output, borrowed.output)
    assert not full.trainable().output and not full.trainable().embedding


def test_heads_are_equal_by_value() -> None:
    one, other = cases.tiny(KEPT)[0], cases.tiny(KEPT)[0]
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    "kept", [None, KEPT[::-1], KEPT[:-1], np.array([*KEPT[:-1], cases.VOCAB])], ids=str
)
def test_a_wrong_draft_vocabulary_is_refused(kept: np.ndarray | None) -> None:
    head, _, borrowed = cases.tiny(KEPT)
    with pytest.raises(PairingError, match="draft vocabulary"):
        head.init(jax.random.key(0), borrowed, kept)


def test_maps_hold_offsets() -> None:
    d2t, t2d = vocabulary_maps(np.array([1, 4, 5]), 7, 3)
    assert d2t.tolist() == [1, 3, 3]
    assert np.flatnonzero(t2d).tolist() == [1, 4, 5]


def test_a_short_head_without_a_map_cannot_exist() -> None:  # F32
    head = cases.tiny(KEPT)[0]
    with pytest.raises(PairingError, match="d2t and t2d"):
        dataclasses.replace(head, mapped=False)


@pytest.mark.parametrize(
    ("layers", "config", "match"),
    [
        (2, Eagle3Config(), r"\[2, 1, -1\].*0\.\.2"),
        (3, Eagle3Config(taps=(1, 4)), r"\[1, 4\].*0\.\.3"),
        (3, Eagle3Config(taps=(1,), heads=3, kv_heads=2), "3 heads"),
    ],
    ids=["default-taps", "tap-4", "heads"],
)
def test_what_a_target_cannot_give_is_refused(
    layers: int, config: Eagle3Config, match: str
) -> None:
    with pytest.raises(PairingError, match=match):
        Eagle3Head.for_target(cases.info(num_layers=layers), cases.tiny_block(), config)
