"""Loss terms against the reference's values and gradients, and where they must not be NaN."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.io.hf import TensorReader
from specjax.layers import losses

FIXTURE = Path(__file__).parents[1] / "fixtures" / "losses" / "expected.safetensors"
SAME = 3  # the slot where p = q: min has a tie there, any subgradient is right


@pytest.fixture(scope="module")
def given() -> dict[str, np.ndarray]:
    reader = TensorReader(FIXTURE)
    return {name: reader.read(name) for name in reader.shapes}


def agree(got: jax.Array, expected: np.ndarray, relative: float = 1e-4) -> None:
    scale = max(1.0, np.abs(expected).max()) if relative == 1e-4 else np.abs(expected).max()
    assert np.abs(np.asarray(got) - expected).max() <= relative * scale


@pytest.mark.parametrize("name", sorted(losses.TERMS))
def test_term_and_gradient_agree(given: dict[str, np.ndarray], name: str) -> None:
    draft, target = jnp.asarray(given["draft_logits"]), jnp.asarray(given["target_logits"])
    term = losses.TERMS[name]
    agree(term(draft, target), given[f"{name}.value"])
    gradient = np.array(jax.grad(lambda x: term(x, target).sum())(draft))
    expected = given[f"{name}.grad"].copy()
    if name in ("tv", "nla", "lk_hybrid"):
        gradient[:, SAME], expected[:, SAME] = 0, 0
    agree(gradient, expected, 2e-3)


def test_no_term_teaches_the_target(given: dict[str, np.ndarray]) -> None:
    draft, target = jnp.asarray(given["draft_logits"]), jnp.asarray(given["target_logits"])
    for name, term in losses.TERMS.items():
        gradient = jax.grad(lambda x, term=term: term(draft, x).sum())(target)
        assert not np.any(gradient), name


def test_lk_hybrid_takes_another_eta(given: dict[str, np.ndarray]) -> None:
    draft, target = jnp.asarray(given["draft_logits"]), jnp.asarray(given["target_logits"])
    agree(losses.lk_hybrid(draft, target, eta=5.0), given["lk_hybrid.eta5.value"])


def weights_of(given: dict[str, np.ndarray], kind: str) -> jax.Array:
    if kind != "dpace":
        return losses.position_weights(kind, jnp.asarray(given["pos_idx"]))
    entropy = losses.ce(jnp.asarray(given["draft_logits"]), jnp.asarray(given["target_logits"]))
    blocks = (1, 4, 5)
    mask = jnp.asarray(given["loss_mask"]).reshape(blocks)
    return losses.dpace_weights(entropy.reshape(blocks), mask).reshape(1, 20)


@pytest.mark.parametrize("kind", ["none", "dflash", "dflash_from_anchor", "exp", "dpace"])
def test_weights_and_reductions_agree(given: dict[str, np.ndarray], kind: str) -> None:
    target, mask = jnp.asarray(given["target_logits"]), jnp.asarray(given["loss_mask"])
    weights = weights_of(given, kind)
    if kind != "none":
        agree(weights, given[f"decay.{kind}"])

    def reduced(name: str, draft: jax.Array) -> jax.Array:
        return losses.reduce_rows(losses.TERMS[name](draft, target), mask, weights)

    draft = jnp.asarray(given["draft_logits"])
    for name in ("kl_div", "ce", "tv"):
        key = f"reduced.{name}.{kind}"
        if key in given:
            agree(reduced(name, draft), given[key])
        if f"{key}.grad" in given:
            gradient = np.array(jax.grad(functools.partial(reduced, name))(draft))
            expected = given[f"{key}.grad"].copy()
            if name == "tv":
                gradient[:, SAME], expected[:, SAME] = 0, 0
            agree(gradient, expected, 2e-3)


def test_a_mixture_reduces_each_term_by_itself(given: dict[str, np.ndarray]) -> None:
    mixed = losses.mixture(
        {"ce": 0.1, "tv": 0.9},
        jnp.asarray(given["draft_logits"]),
        jnp.asarray(given["target_logits"]),
        jnp.asarray(given["loss_mask"]),
        weights_of(given, "dflash_from_anchor"),
    )
    agree(mixed, given["compound.ce0.1_tv0.9"])


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(ValueError, match="dflash_from_anchor"):
        losses.position_weights("linear", jnp.arange(3))


def test_soft_cross_entropy_is_kl_plus_entropy(given: dict[str, np.ndarray]) -> None:
    draft, target = jnp.asarray(given["draft_logits"]), jnp.asarray(given["target_logits"])
    p = jax.nn.softmax(target)
    entropy = -jnp.sum(p * jax.nn.log_softmax(target), axis=-1)
    agree(losses.soft_cross_entropy(draft, p) - entropy, given["kl_div.value"])


@pytest.mark.parametrize("rows", [[False, False], [True, False]])
def test_masked_rows_give_neither_nan_nor_gradient(rows: list[bool]) -> None:
    mask = jnp.asarray([rows])
    accept = jnp.asarray([[0.5, 0.0]])
    for loss in (
        lambda a: losses.lk_alpha(a, mask),
        lambda a: losses.lk_lambda(jnp.float32(1.0), a, mask),
        lambda a: losses.reduce_rows(jnp.where(mask, a, jnp.nan), mask),
    ):
        value, gradient = jax.value_and_grad(loss)(accept)
        assert np.isfinite(value)
        assert np.all(np.isfinite(gradient))
        assert gradient[0, 1] == 0


def test_lk_alpha_of_a_counted_row_without_overlap_is_zero() -> None:
    value, gradient = jax.value_and_grad(losses.lk_alpha)(jnp.zeros(1), jnp.ones(1, bool))
    assert value == 0
    assert gradient[0] == 0


def test_bfloat16_logits_are_compared_in_float32() -> None:
    logits = jnp.asarray([[3.0, 1.0, -2.0]], jnp.bfloat16)
    for term in losses.TERMS.values():
        assert term(logits, logits).dtype == jnp.float32
