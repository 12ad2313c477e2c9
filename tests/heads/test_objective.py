"""Terms, weights and divisors of an objective against sums written out in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import ConfigError
from specjax.heads import objective
from specjax.heads.objective import Objective
from specjax.layers import losses

B, N, K, V = 2, 3, 4, 7
RNG = np.random.default_rng(0)
DRAFT, TARGET = RNG.normal(size=(2, B, N, K, V)) * 2
LABELS = RNG.integers(0, V, (B, N, K))
MASK = RNG.uniform(size=(B, N, K)) < 0.6
MASK[1, 2] = False
SLOT = np.arange(K)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


Q, P = log_softmax(DRAFT), log_softmax(TARGET)
SHARED = np.minimum(np.exp(Q), np.exp(P)).sum(-1)
KL = (np.exp(P) * (P - Q)).sum(-1)
HARD = -np.take_along_axis(Q, LABELS[..., None], -1)[..., 0]
WANTED: dict[str, np.ndarray] = {
    "hard_ce": HARD,
    "soft_ce": -(np.exp(P) * Q).sum(-1),
    "ce": -np.take_along_axis(Q, TARGET.argmax(-1)[..., None], -1)[..., 0],
    "kl_div": KL,
    "tv": 1 - SHARED,
    "l1": np.abs(np.exp(Q) - np.exp(P)).sum(-1),
    "nla": -np.log(SHARED),
    "lk_hybrid": np.exp(-5 * SHARED) * KL + (1 - np.exp(-5 * SHARED)) * (1 - SHARED),
}


def run(rule: Objective) -> Any:
    draft, target = jnp.asarray(DRAFT, jnp.float32), jnp.asarray(TARGET, jnp.float32)
    mask = jnp.asarray(MASK)
    terms = objective.slot_terms(rule, draft, target, jnp.asarray(LABELS))
    weights = objective.slot_weights(rule, jnp.asarray(SLOT), mask, terms)
    return terms, weights, objective.total(rule, terms, mask, weights)


def test_terms() -> None:
    terms, _, _ = run(Objective(terms=tuple(WANTED), lk_eta=5.0))
    assert list(terms) == list(WANTED)
    for name, want in WANTED.items():
        np.testing.assert_allclose(terms[name], want, rtol=2e-5, atol=2e-6, err_msg=name)


def decay(kind: str) -> np.ndarray:
    if kind == "dpace":
        out = np.zeros(MASK.shape)
        for b, n in np.ndindex(B, N):
            on = MASK[b, n]
            share = np.where(on, 0.7 * np.exp(-HARD[b, n]) + 0.3, 1.0)
            reach = np.cumprod(share)
            out[b, n] = [sum(reach[j] for j in range(k, K) if on[j]) for k in range(K)]
        return out
    return {
        "none": np.ones(K),
        "dflash": np.where(SLOT == 0, 0.0, np.exp(-(SLOT - 1) / 3)),
        "dflash_from_anchor": np.exp(-SLOT / 3),
        "exp": 0.9**SLOT,
    }[kind]


DIVISORS = {
    "all": lambda value, w: value.sum() / MASK.size,
    "counted": lambda value, w: value.sum() / MASK.sum(),
    "counted_per_row": lambda value, w: np.mean(
        [value[b].sum() / (MASK[b].sum() + 1e-5) for b in range(B)]
    ),
    "weights": lambda value, w: value.sum() / w.sum(),
    "weights_eps": lambda value, w: value.sum() / (w.sum() + 1e-6),
    "rows": lambda value, w: value.sum() / B,
}


@pytest.mark.parametrize("weighting", ["none", "dflash", "dflash_from_anchor", "exp", "dpace"])
def test_weights_and_divisors(weighting: str) -> None:
    for normaliser, divide in DIVISORS.items():
        rule = Objective(
            terms=("hard_ce", "tv"),
            factors=(0.1, 0.9),
            weighting=weighting,  # type: ignore[arg-type]
            gamma=3.0,
            base=0.9,
            dpace_alpha=0.3,
            normaliser=normaliser,  # type: ignore[arg-type]
        )
        _, weights, (loss, parts) = run(rule)
        w = MASK * decay(weighting)
        np.testing.assert_allclose(weights, w, rtol=1e-5, atol=1e-7)
        want = {"hard_ce": divide(w * HARD, w), "tv": divide(w * (1 - SHARED), w)}
        for name, value in want.items():
            np.testing.assert_allclose(parts[name], value, rtol=1e-5, err_msg=normaliser)
        np.testing.assert_allclose(loss, 0.1 * want["hard_ce"] + 0.9 * want["tv"], rtol=1e-5)


def test_what_does_not_count_may_be_anything() -> None:
    """No slot counts: 0 with a gradient of 0, whatever stands there, under every divisor."""
    term = jnp.full((B, K), jnp.nan)
    for normaliser in DIVISORS:
        rule = Objective(normaliser=normaliser)  # type: ignore[arg-type]

        def loss(x: jax.Array, rule: Objective = rule) -> jax.Array:
            off = jnp.zeros((B, K), bool)
            return objective.reduce(rule, x, off, jnp.zeros((B, K)))

        value, gradient = jax.value_and_grad(loss)(term)
        assert float(value) == 0 and not np.asarray(gradient).any(), normaliser


def test_the_teacher_gets_no_gradient_and_weights_give_none() -> None:
    rule = Objective(terms=("hard_ce", "soft_ce", "l1", "kl_div"), weighting="dpace")
    mask, labels = jnp.asarray(MASK), jnp.asarray(LABELS)

    def loss(draft: jax.Array, target: jax.Array, frozen: bool) -> jax.Array:
        terms = objective.slot_terms(rule, draft, target, labels)
        weights = objective.slot_weights(rule, jnp.asarray(SLOT), mask, terms)
        weights = jax.lax.stop_gradient(weights) if frozen else weights
        return objective.total(rule, terms, mask, weights)[0]

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    draft, target = jnp.asarray(DRAFT, jnp.float32), jnp.asarray(TARGET, jnp.float32)
    own, teacher = gradient(draft, target, False)
    np.testing.assert_array_equal(own, gradient(draft, target, True)[0])
    assert not np.asarray(teacher).any() and np.asarray(own).any()
    assert objective.needs_teacher(rule) and not objective.needs_teacher(Objective())


def test_cross_entropies_of_single_numbers() -> None:
    z, y = np.asarray([-90.0, -2.0, 0.0, 3.0, 90.0]), np.asarray([0.0, 0.3, 1.0, 0.8, 1.0])
    c = 1 / (1 + np.exp(-np.clip(z, -30, 30)))
    want = -(y * np.log(c) + (1 - y) * np.log(np.where(y < 1, 1 - c, 1.0)))
    got = losses.binary_cross_entropy(jnp.asarray(z), jnp.asarray(y))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert losses.hard_cross_entropy(jnp.zeros((1, 4)), jnp.asarray([2]))[0] == np.float32(
        np.log(4)
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"terms": ()}, "name each term once"),
        ({"terms": ("tv", "tv")}, "name each term once"),
        ({"terms": ("tv",), "factors": (1.0, 2.0)}, "2 numbers for 1 terms"),
        ({"gamma": 0.0}, "must be positive"),
        ({"dpace_alpha": 1.5}, "must be in 0..1"),
        ({"terms": ("tv",), "weighting": "dpace"}, 'needs "ce" or "hard_ce"'),
    ],
)
def test_refusals(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Objective(**wrong)
