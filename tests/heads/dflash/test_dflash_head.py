"""DFlash and DSpark as heads: the network, its cache, what a round sees, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.fixture_checks import blocks
from scripts.fixture_checks.compare import compare
from scripts.fixture_checks.fixture import read_fixture
from scripts.fixture_checks.outcome import Outcome
from specjax.core.errors import ConfigError, PairingError
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.fit import spread_taps
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.dflash.network import (
    base_logits,
    context_keys,
    embed_slots,
    fuse,
    run_slots,
    sees_context,
    sees_slots,
)
from specjax.layers.attention import KeyBlock
from specjax.layers.sampling import Sampling
from tests.heads.dflash import cases
from tests.heads.dflash.cases import DFLASH, DSPARK, SLIDING, jit


def test_rounds_agree_with_the_reference_with_and_without_its_cache() -> None:
    fixture = read_fixture(cases.FIXTURES / "dspark_gemma4")
    tensors = blocks.inference(blocks.load(fixture), fixture)
    lines = [x for x in compare(fixture, Outcome(tensors)) if x.tensor.startswith("infer.")]
    assert len(lines) == 18
    assert not [x for x in lines if x.failed or x.absent]


CAUSAL = {"sliding": (True, False), "none": (False, False), "all": (True, True)}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, None),
        ({**SLIDING}, "slot"),
        ({**SLIDING, "causal": "none", "sliding_window": 3}, "slot"),
        ({**SLIDING, "causal": "all"}, "slot"),
        ({**SLIDING, "layout": "speculators"}, "anchor"),
    ],
    ids=["full", "sliding", "sliding-not-causal", "all-causal", "speculators"],
)
def test_a_block_is_what_the_published_formulas_say(
    settings: dict[str, Any], rule: str | None
) -> None:
    head, params = cases.tiny({**DFLASH, **settings})
    length, window = 11, head.config.sliding_window
    sliding = [kind == "sliding" for kind in head.config.layer_types]
    causal = CAUSAL[head.config.causal] if rule else (False, False)

    def visible(layer: int, slot: int, kind: str, index: int) -> bool:
        if kind == "slot":
            near = rule != "slot" or not sliding[layer] or abs(slot - index) < window
            return near and (index <= slot or not causal[layer])
        if not sliding[layer]:
            return True
        edge = length + slot - window + 1 if rule == "slot" else length - window
        return index >= edge

    taps = cases.states(1, length)
    state = cases.after(head, params, taps)
    lent = cases.borrowed()
    hidden, logits = cases.block(head, params, lent, state)
    table = np.asarray(lent.embedding)
    expected = cases.reference_hidden(head, params, table, np.asarray(taps)[:, 0], 3, visible)
    np.testing.assert_allclose(hidden[0], expected, atol=2e-5)
    output = np.asarray(lent.output, np.float64)
    np.testing.assert_allclose(logits[0], expected[1:] @ output.T, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{**DFLASH}, {**DFLASH, **SLIDING}, {**DSPARK, **SLIDING}],
    ids=["full", "windows-by-slot", "windows-by-anchor"],
)
def test_masks_for_training_are_what_the_cache_shows(settings: dict[str, Any]) -> None:
    head, params = cases.tiny(settings)
    length, anchor = 14, 9
    taps, lent = cases.states(1, length), cases.borrowed()

    @jit
    def train(params: Any) -> jax.Array:
        at = jnp.arange(length)
        known = context_keys(head, params, fuse(head, params, taps), at[None])
        tokens = jnp.asarray([[3] + [cases.MASK] * (head.config.block_size - 1)])
        places = (anchor + jnp.arange(tokens.shape[1]))[None]

        def visible(i: int, own: Any) -> list[KeyBlock]:
            mask = sees_context(head, i, jnp.asarray([anchor]), at)
            return [KeyBlock(*known[i], mask), KeyBlock(*own, sees_slots(head, i)[None])]

        return run_slots(
            head, params, embed_slots(head, params, lent, tokens), places, visible, remat=True
        )

    state = cases.after(head, params, taps[:, :, :anchor])
    hidden, _ = cases.block(head, params, lent, state)
    np.testing.assert_allclose(train(params), hidden, atol=1e-5)


def test_slots_that_are_not_kept_attend_to_nothing() -> None:
    head, params = cases.tiny(DFLASH, layers=1)
    lent, tokens = cases.borrowed(), jnp.asarray([[3, 39, 39]])
    slots = embed_slots(head, params, lent, tokens)

    def run(value: float) -> jax.Array:
        def visible(i: int, own: Any) -> list[KeyBlock]:
            return [KeyBlock(own[0], own[1] * value, jnp.ones((1, 1, 3), bool))]

        keep = jnp.asarray([[True, False, True]])
        return run_slots(head, params, slots, jnp.arange(3)[None], visible, keep)

    one, two = run(1.0), run(2.0)
    np.testing.assert_array_equal(one[:, 1], two[:, 1])
    assert np.abs(one - two).max(-1)[0, [0, 2]].min() > 1e-3


@pytest.mark.parametrize("settings", [DFLASH, {**DSPARK, **SLIDING}], ids=["full", "sliding"])
def test_a_state_after_rejections_is_one_built_from_scratch(settings: dict[str, Any]) -> None:
    head, params = cases.tiny(settings)
    rows, width, rng = 3, head.max_tokens + 1, np.random.default_rng(1)
    truth = cases.states(rows, 128, seed=4)
    lent = cases.borrowed()
    state = head.init_state(rows, 140)
    for _ in range(20):
        cases.block(head, params, lent, state)
        count, start = rng.integers(0, width + 1, rows), np.asarray(state.lengths)
        # Behind the accepted positions stand states of rejected drafts: garbage.
        seen = np.stack([np.asarray(truth[:, b, s : s + width]) for b, s in enumerate(start)], 1)
        rejected = np.arange(width)[None] >= count[:, None]
        seen = np.where(rejected[None, :, :, None], 1e3, seen)
        news = cases.observation(jnp.asarray(seen), count, start)
        state = cases.observe(head, params, lent, state, news)
    assert len(set(np.asarray(state.lengths))) == rows
    scratch = cases.after(head, params, truth, state.lengths, capacity=140)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(scratch), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    ours, theirs = (cases.block(head, params, lent, s)[1] for s in (state, scratch))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_nothing_observed_changes_nothing() -> None:
    head, params = cases.tiny({**DFLASH, **SLIDING})
    state = cases.after(head, params, cases.states(2, 9))
    more = cases.observation(cases.states(2, 3, seed=8), [0, 2], state.lengths)
    moved = cases.observe(head, params, cases.borrowed(), state, more)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(a[0], b[0])
    assert int(moved.lengths[1]) == 11


def test_a_window_is_respected_and_head_dim_read() -> None:  # F11
    settings = {**DFLASH, "layer_types": ("sliding",) * 2, "sliding_window": 8}
    head, params = cases.tiny(settings)
    assert params.layers[0].attention.q.shape == (24, 16)  # 2 heads of 12, not of 16 / 2
    taps = np.asarray(cases.states(1, 39))

    def logits(perturbed: int, head: DFlashHead = head) -> np.ndarray:
        moved = taps.copy()
        moved[:, :, perturbed] += 3
        state = cases.after(head, params, jnp.asarray(moved), capacity=48)
        return np.asarray(cases.block(head, params, cases.borrowed(), state)[1])

    # The anchor stands at 39: its slot sees 32.. and those behind it less.
    np.testing.assert_array_equal(logits(5), logits(31))
    assert np.abs(logits(36) - logits(5)).max() > 1e-3
    wide = dataclasses.replace(head, config=cases.tiny(DFLASH)[0].config)
    assert np.abs(logits(5, wide) - logits(31, wide)).max() > 1e-3


def test_gemma_targets_lend_their_scale_and_cap() -> None:  # F13
    facts = cases.gemma_info()
    head, params = cases.tiny(DFLASH, facts=facts)
    lent = cases.borrowed()
    tokens = jnp.asarray([[3, 39]])
    expected = np.asarray(lent.embedding)[np.asarray(tokens)] * 4
    np.testing.assert_allclose(embed_slots(head, params, lent, tokens), expected, rtol=1e-6)
    h = jnp.asarray(np.random.default_rng(0).normal(size=(2, cases.HIDDEN)) * 50, jnp.float32)
    logits = np.asarray(base_logits(head, params, lent, h))
    raw = np.asarray(h, np.float64) @ np.asarray(lent.output, np.float64).T
    assert np.abs(logits).max() <= 5.0
    np.testing.assert_allclose(logits, 5 * np.tanh(raw / 5), atol=1e-4)


def test_fewer_drafts_are_the_first_of_the_same_block() -> None:
    head, params = cases.tiny(DSPARK)
    state = cases.after(head, params, cases.states(2, 9))
    sampling = Sampling.of(2, temperature=[0.0, 1.0], seed=[1, 2])
    around = cases.context(state, [3, 4], sampling)
    lent = cases.borrowed()
    whole, some = (cases.draft(head, params, lent, state, around, n)[0] for n in (5, 2))
    np.testing.assert_array_equal(whole.tokens[:, :2], some.tokens)
    np.testing.assert_allclose(whole.probs[:, :2], some.probs, atol=1e-6)
    np.testing.assert_allclose(whole.confidence[:, :2], some.confidence, atol=1e-6)
    none = head.propose(params, lent, state, around, 0)
    assert none.tokens.shape == (2, 0)


@pytest.mark.parametrize(("from_anchor", "drafts"), [(True, 7), (False, 6)])
def test_a_block_of_seven_gives_no_more_than_it_was_trained_for(  # F64
    from_anchor: bool, drafts: int
) -> None:
    head, params = cases.tiny(DFLASH, block_size=7, sample_from_anchor=from_anchor)
    assert head.max_tokens == drafts
    state = head.init_state(1, 16)
    with pytest.raises(ConfigError, match=rf"12 drafts.*7 slots.*at most {drafts}"):
        head.propose(params, cases.borrowed(), state, cases.context(state), 12)


def test_temperatures_of_the_confidences_act_by_position() -> None:
    head, params = cases.tiny(DSPARK)
    cool = dataclasses.replace(head, temperatures=(1.0, 2.0, 0.5, 1.0, 4.0))
    state = cases.after(head, params, cases.states(1, 9))
    around = cases.context(state)
    proposal, done = cases.draft(cool, params, cases.borrowed(), state, around, 3)
    z = np.asarray(done.confidence_logits, np.float64)
    expected = 1 / (1 + np.exp(-z / np.array([1.0, 2.0, 0.5])))
    np.testing.assert_allclose(proposal.confidence, expected, atol=1e-6)
    assert head.has_confidence and not cases.tiny(DFLASH)[0].has_confidence


def test_it_drafts_in_bfloat16() -> None:
    head, params = cases.tiny({**DSPARK, **SLIDING}, markov_head="rnn")
    taps, lent = cases.states(2, 9), cases.borrowed()

    def logits(dtype: str) -> np.ndarray:
        low = jax.tree.map(lambda x: x.astype(dtype), params)
        state = head.init_state(2, 24, dtype)
        seen = cases.observation(taps.astype(dtype), 9, 0)
        state = cases.observe(head, low, lent, state, seen)
        assert state.layers[0].k.dtype == dtype
        done = cases.draft(head, low, lent, state, cases.context(state), 2)[1]
        assert done.logits.dtype == jnp.float32
        return np.asarray(done.logits)

    exact, rough = logits("float32"), logits("bfloat16")
    assert np.corrcoef(exact.ravel(), rough.ravel())[0, 1] > 0.99


def test_gemma_layers_copy_the_full_attention_layers_of_their_target() -> None:
    settings = {**DFLASH, "sample_from_anchor": True, "body": "gemma4"}
    head = DFlashHead.for_target(cases.gemma_info(), DFlashConfig(**settings))
    attention = head.geometry.layer.attention
    assert (attention.kv_heads, attention.head_dim, attention.value_is_key) == (1, 8, True)
    assert attention.rope.kind == "proportional"
    assert not head.trainable().layers[0].scalar
    assert head.trainable().layers[0].attention.q
    with pytest.raises(PairingError, match="needs a Gemma 4 target"):
        DFlashHead.for_target(cases.info(), DFlashConfig(**settings))


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
        (61, 6, (1, 12, 24, 35, 47, 58)),
        (60, 6, (1, 12, 23, 35, 46, 57)),
        (30, 6, (1, 6, 11, 17, 22, 27)),
        (12, 1, (6,)),
    ],
)
def test_taps_spread_as_in_published_heads(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert spread_taps(count, layers) == tuple(i + 1 for i in ids)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_taps_of_shallow_targets_exist(layers: int) -> None:
    taps = spread_taps(5, layers)
    assert taps == tuple(sorted(set(taps)))
    assert taps[0] >= 0 and taps[-1] < max(layers, 1)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"mask_token_id": -1}, ConfigError, "mask_token_id must name"),
        ({"mask_token_id": 40}, PairingError, r"mask_token_id 40.*0\.\.39"),
        ({"taps": (1, 7)}, PairingError, r"\[1, 7\].*0\.\.5"),
        ({"taps": (1, 6)}, PairingError, r"0\.\.5 for a head in zlab layout"),
        ({"heads": 3, "kv_heads": 2}, PairingError, "3 heads do not divide"),
        ({"layout": "zlab", "sample_from_anchor": True}, ConfigError, "zlab has no sample_from"),
        ({"causal": "all", "sample_from_anchor": True}, ConfigError, "no layout can express"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        DFlashHead.for_target(cases.info(), DFlashConfig(**{**DFLASH, **changes}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"confidence": True, "confidence_with_markov": True},  # F21
            "confidence_with_markov needs a sequential head",
        ),
        ({"markov_rank": 4, "confidence_with_markov": True}, "confidence is off"),
        ({"block_size": 1}, "no slot"),
        ({"layer_types": ("sliding", "full")}, "sliding_window must be positive"),
        ({"layer_types": ("full",)}, "names 1 layers"),
        ({"markov_head": "lstm"}, "'lstm' does not exist"),
        ({"layers": 0, "layer_types": ()}, "at least 1"),
        ({"mlp": -1}, "must not be negative"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DFlashConfig(**{**DFLASH, **changes})


def test_confidence_without_a_sequential_head_is_plain_dflash_and_more() -> None:  # F21
    head, params = cases.tiny(DFLASH, sample_from_anchor=True, confidence=True)
    assert head.name == "dspark"
    assert params.confidence.weight.shape == (1, cases.HIDDEN)
    state = cases.after(head, params, cases.states(1, 9))
    around = cases.context(state)
    proposal = cases.draft(head, params, cases.borrowed(), state, around, 2)[0]
    assert np.asarray(proposal.confidence).shape == (1, 2)
