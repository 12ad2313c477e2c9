"""Native MTP as a draft head: references, rounds, several modules, recycled states, sampling."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import targets
from specjax.core.errors import ConfigError, PairingError
from specjax.heads import find
from specjax.heads.base import borrow
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead, MtpState
from specjax.heads.mtp.network import last_output
from specjax.io.hf import TensorReader
from specjax.layers.context import Context
from specjax.layers.sampling import Sampling
from tests.heads.mtp import cases


def observed(
    head: MtpHead, params: Any, lent: Any, text: cases.Texts, lengths: list[int]
) -> MtpState:
    """Take in the first positions of each row at once."""
    rows, size = text.hidden.shape[:2]
    seen = cases.observation(text, 0, lengths, size)
    return cases.jit(head.observe)(params, lent, head.init_state(rows, size), seen)


def drafted(head: MtpHead, params: Any, lent: Any, state: MtpState, num: int) -> tuple:
    """Return (tokens, logits `[B, K, V]`)."""

    @cases.jit
    def draft(params: Any, lent: Any, state: MtpState) -> tuple:
        proposal, _, logits = head.draft(params, lent, state, cases.context(state), num)
        return proposal.tokens, jnp.stack(logits, axis=1)

    return draft(params, lent, state)


# -- against references ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def release() -> tuple:
    """A Qwen3.5 release with its module: (target, weights, head, module, stored tensors)."""
    root = cases.FIXTURES / "qwen3_5_vl_mtp"
    target, params = targets.load(root)
    head, modules = find("mtp", root, target.info)
    reader = TensorReader(root / "expected.safetensors")
    return target, params, head, modules, {n: reader.read(n) for n in reader.shapes}


@pytest.mark.parametrize("carried", ["normed", "raw"])
def test_a_release_drafts_as_transformers_does(release: tuple, carried: str) -> None:
    target, params, head, modules, stored = release
    head = dataclasses.replace(head, config=dataclasses.replace(head.config, carried=carried))
    kind = "draft" if carried == "normed" else "draft_prenorm"
    lengths = stored["mtp.draft.prefix_len"]
    rows = len(lengths)
    tokens = np.tile(np.append(stored["input_ids"][0], 0), (rows, 1)).astype(np.int32)
    tokens[np.arange(rows), lengths] = stored["mtp.draft.next_token"][:, 0]
    text = cases.Texts(tokens, np.tile(stored["final_hidden"][0], (rows, 1, 1)))
    lent = borrow(target, params)
    state = observed(head, modules, lent, text, lengths)
    found, logits = drafted(head, modules, lent, state, 3)
    np.testing.assert_array_equal(found, stored[f"mtp.{kind}.tokens"])
    expected = stored[f"mtp.{kind}.logits"]
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_the_normed_state_of_the_target_is_what_counts(release: tuple) -> None:
    # F6: with the state before the final norm the same module drafts from other logits.
    target, params, head, modules, stored = release
    rows, lent = stored["input_ids"].astype(np.int32), borrow(target, params)
    length = rows.shape[1] - 1
    expected = stored["mtp.logits"][:, length - 1]
    found = []
    for states in (stored["final_hidden"], stored["hidden_states"][-1]):
        text = cases.Texts(rows, states[:, :length])
        state = observed(head, modules, lent, text, [length] * len(rows))
        found.append(drafted(head, modules, lent, state, 1)[1][:, 0])
    np.testing.assert_allclose(found[0], expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(found[1] - expected).max() > 0.5


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("llama", {}),
        ("llama", {"modules": 2}),
        ("llama", {"modules": 3, "carried": "raw"}),
        ("llama", {"modules": 3}),
        ("gemma4", {"modules": 2}),  # F13: scaled embeddings, capped logits
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_drafts_equal_a_float64_run_from_scratch(target: str, settings: dict[str, Any]) -> None:
    # F7: what is carried is normed at every depth, or at none; rows as short as the text can be.
    head, params, lent = cases.tiny(target, **settings)
    lengths, num = [12, 1, 2, 7], 5
    text = cases.texts(4, 12)
    state = observed(head, params, lent, text, lengths)
    tokens, logits = drafted(head, params, lent, state, num)
    for row, p in enumerate(lengths):
        expected, scores = cases.numpy_drafts(
            head, params, lent, text.hidden[row, :p], text.tokens[row, : p + 1], num
        )
        np.testing.assert_allclose(logits[row], scores, atol=1e-4 * np.abs(scores).max())
        np.testing.assert_array_equal(tokens[row], expected)
    if head.softcap is not None:
        assert head.embed_scale != 1 and np.abs(logits).max() <= head.softcap


def test_the_second_token_is_not_lost() -> None:
    # F8: a text of two tokens, of which the second changes.
    text = cases.texts(1, 1)
    other = dataclasses.replace(text, tokens=(text.tokens + 1) % cases.VOCAB)
    for zero_first in (False, True):
        head, params, lent = cases.tiny("llama", zero_first=zero_first)
        found = [
            drafted(head, params, lent, observed(head, params, lent, t, [1]), 1)[1]
            for t in (text, other)
        ]
        assert np.array_equal(*found) == zero_first


# -- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "modules"),
    [("llama", 1), ("llama", 3), ("qwen3_5", 1), ("deepseek_v3", 2)],
)
def test_the_state_after_twenty_rounds_equals_one_from_scratch(target: str, modules: int) -> None:
    head, params, lent = cases.tiny(target, modules=modules)
    rng, rows, window, size = np.random.default_rng(5), 3, 4, 80
    text, observe = cases.texts(rows, size), cases.jit(head.observe)
    state, at = head.init_state(rows, size), np.zeros(rows, np.int32)
    for turn in range(20):
        count = rng.integers(0, window + 1, rows) if turn else np.asarray([1, 2, 0])
        seen = cases.observation(text, at, count, window, spoil=turn)
        before, state = state, observe(params, lent, state, seen)
        idle = np.flatnonzero(count == 0)
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(np.asarray(new)[idle], np.asarray(old)[idle])
        at = at + count
    np.testing.assert_array_equal(state.lengths, at)
    fresh = observed(head, params, lent, text, at)
    np.testing.assert_allclose(state.outputs, fresh.outputs, rtol=1e-4, atol=1e-4)
    for k, (ours, theirs) in enumerate(zip(state.entries, fresh.entries, strict=True)):
        axis = 1 if target == "deepseek_v3" else 2
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            for row, length in enumerate(at):
                held = [np.moveaxis(np.asarray(x[row]), axis - 1, 0)[: length - k] for x in (a, b)]
                np.testing.assert_allclose(*held, rtol=1e-4, atol=1e-4)
    assert at.min() > 20


@pytest.mark.parametrize("target", ["qwen3_5", "deepseek_v3"])
def test_a_chain_equals_true_states_that_are_the_carried_ones(target: str) -> None:
    """A recycled entry is what `observe` makes of the carried state, were it the target's."""
    head, params, lent = cases.tiny(target)
    length, num = 6, 3
    text = cases.texts(2, length)
    state = observed(head, params, lent, text, [length, length])
    draft = cases.jit(partial(head.draft, num=num))
    proposal, outs, logits = draft(params, lent, state, cases.context(state))
    module = params.modules[0]
    offset = 1.0 if head.norm_offset else 0.0

    def normed(out: np.ndarray) -> np.ndarray:
        return cases.numpy_norm(cases.wide(out), offset + cases.wide(module.norm), head.eps)

    longer = cases.Texts(
        np.concatenate([text.tokens, proposal.tokens[:, :-1]], axis=1),
        np.concatenate([text.hidden, *(normed(o)[:, None] for o in outs[:-1])], axis=1),
    )
    size = length + num - 1
    whole = observed(head, params, lent, longer, [size, size])
    np.testing.assert_allclose(whole.outputs[:, 0], outs[-1], rtol=1e-4, atol=1e-4)
    scores = normed(outs[-1]) @ cases.wide(lent.output).T
    np.testing.assert_allclose(logits[-1], scores, rtol=1e-4, atol=1e-3)


def test_drafting_leaves_the_state_and_needs_none_of_the_caches_copied() -> None:
    head, params, lent = cases.tiny("llama")
    size = 512
    state = jax.eval_shape(lambda: head.init_state(4, size))
    step = jax.jit(partial(head.propose, num=4))
    compiled = step.lower(params, lent, state, jax.eval_shape(cases.context, state)).compile()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.entries))
    assert compiled.memory_analysis().temp_size_in_bytes < held


@pytest.mark.parametrize("target", ["llama", "qwen3_5", "deepseek_v3"])
def test_observing_runs_the_feed_forward_of_one_position(target: str) -> None:
    """What only other positions' outputs need is not in the compiled program."""
    head, params, _ = cases.tiny(target)
    length, kind, weights = 64, head.layer, params.modules[0].layer
    x = jnp.zeros((1, length, cases.HIDDEN))
    entry, zero = head.cache.empty(1, 8, "float32"), jnp.zeros(1, jnp.int32)

    def flops(function: Any) -> float:
        return jax.jit(function).lower(x).compile().cost_analysis()["flops"]

    one = flops(lambda x: last_output(kind, weights, x, entry, zero, zero + length - 1))
    ctx = Context.of(zero, zero + length, length, kind.ropes)
    assert one < 0.6 * flops(lambda x: kind.run(weights, x, ctx, entry, 0))


# -- settings -------------------------------------------------------------------------------------


def test_sampled_rows_draw_from_what_they_report() -> None:
    head, params, lent = cases.tiny("llama", modules=2)
    state = observed(head, params, lent, cases.texts(2, 5), [5, 4])
    sampling = Sampling.of(2, temperature=[0.0, 1.5], seed=[1, 2])
    draft = cases.jit(partial(head.draft, num=3))
    got, _, logits = draft(params, lent, state, cases.context(state, sampling))
    expected = jax.nn.softmax(jnp.stack(logits, 1)[1] / 1.5)
    np.testing.assert_allclose(got.probs[1], expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(got.tokens[0], jnp.argmax(jnp.stack(logits, 1)[0], -1))
    greedy = dataclasses.replace(head, config=dataclasses.replace(head.config, greedy_drafts=True))
    point = cases.jit(greedy.propose, static_argnums=4)(
        params, lent, state, cases.context(state, sampling), 1
    )
    assert point.probs is None
    np.testing.assert_array_equal(point.tokens[1, 0], jnp.argmax(logits[0][1]))


def test_without_reuse_a_round_has_one_draft_per_module() -> None:
    head, params, lent = cases.tiny("llama", modules=2, reuse=False)
    assert head.max_tokens == 2
    state = head.init_state(1, 8)
    with pytest.raises(ConfigError, match=r"3 drafts per round of 2 MTP modules"):
        head.propose(params, lent, state, cases.context(state), 3)
    assert cases.tiny("llama", modules=2)[0].max_tokens is None
    none = head.propose(params, lent, state, cases.context(state), 0)
    assert none.tokens.shape == (1, 0)


def test_bfloat16_goes_through() -> None:
    head, params, lent = cases.tiny("qwen3_5", modules=2)
    params, lent = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, lent))
    text = cases.texts(1, 6)
    state = head.init_state(1, 8, "bfloat16")
    seen = cases.observation(text, 0, 6, 6)
    state = cases.jit(head.observe)(params, lent, state, seen)
    assert {x.dtype.name for x in jax.tree.leaves(state.entries)} == {"bfloat16"}
    _, logits = drafted(head, params, lent, state, 4)
    assert logits.dtype == jnp.float32 and np.isfinite(logits).all()


def test_heads_are_equal_by_value_and_take_the_targets_modules() -> None:
    a, b = (MtpHead.for_target(cases.info("llama")) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a.modules == 1
    assert MtpHead.for_target(cases.info("llama", draft_modules=2)).modules == 2
    assert MtpHead.for_target(cases.info("qwen3_5")).norm_offset


def test_fresh_weights_start_norms_where_they_do_nothing() -> None:
    for target, start in (("llama", 1.0), ("qwen3_5", 0.0)):
        head = MtpHead.for_target(cases.info(target))
        params = head.init(jax.random.key(0), cases.borrowed())
        np.testing.assert_array_equal(params.modules[0].norm, np.full(cases.HIDDEN, start))
    flags = MtpHead.for_target(cases.info("deepseek_v3")).trainable().modules[0]
    assert flags.fc and not flags.layer.feed_forward.bias and flags.layer.feed_forward.gate


def test_what_cannot_be_a_module_is_refused() -> None:
    with pytest.raises(PairingError, match="names no block"):
        MtpHead.for_target(cases.info("llama", draft_block=None))
    recurrent = targets.from_config(cases.TARGETS["qwen3_5"]).config.kinds[0]
    with pytest.raises(PairingError, match="caches every position, not a linear one"):
        MtpHead.for_target(cases.info("qwen3_5"), MtpConfig(), recurrent)
    small = dataclasses.replace(cases.borrowed(), embedding=jnp.zeros((5, cases.HIDDEN)))
    with pytest.raises(PairingError, match=r"got one of \[5, 32\]"):
        MtpHead.for_target(cases.info("llama")).init(jax.random.key(0), small)
    for wrong in ({"modules": -1}, {"steps": 0}, {"beta": 0.0}, {"carried": "x"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            MtpConfig(**wrong)
