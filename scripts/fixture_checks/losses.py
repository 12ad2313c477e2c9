"""Loss fixtures: terms per slot, position weights, reductions, and their gradients."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from scripts.fixture_checks.fixture import Fixture
from scripts.fixture_checks.outcome import Outcome
from specjax.layers import losses

_OF_OVERLAP = ("tv", "nla", "lk_hybrid")
_WEIGHTS = ("none", "dflash", "dflash_from_anchor", "exp", "dpace")
_NEEDED = ("draft_logits", "target_logits", "loss_mask", "pos_idx")


class _Batch:
    """The inputs of a loss fixture, and the functions of the draft's logits it asks for."""

    def __init__(self, fixture: Fixture) -> None:
        self.draft, self.target, mask, self.slot = (
            jnp.asarray(fixture.inputs[name]) for name in _NEEDED
        )
        self.mask = mask.astype(bool)
        self.block = int(fixture.setting("block_size", default=int(self.slot.max()) + 1))
        self.gamma = float(fixture.setting("gamma", default=4.0))
        self.base = float(fixture.setting("exp_base", default=0.8))
        self.alpha = float(fixture.setting("dpace_alpha", default=0.5))
        self.eta = float(fixture.setting("lk_hybrid_eta", default=3.0))

    def term(self, name: str, eta: float | None = None) -> Callable[[jax.Array], jax.Array]:
        function = losses.TERMS[name]
        if name == "lk_hybrid":
            function = functools.partial(losses.lk_hybrid, eta=self.eta if eta is None else eta)
        return lambda draft: function(draft, self.target)

    def weights(self, kind: str) -> jax.Array:
        if kind != "dpace":
            return losses.position_weights(kind, self.slot, self.gamma, self.base)
        rows = self.mask.shape[0]
        blocks = (rows, -1, self.block)
        entropy = losses.ce(self.draft, self.target).reshape(blocks)
        weights = losses.dpace_weights(entropy, self.mask.reshape(blocks), self.alpha)
        return weights.reshape(self.mask.shape)

    def reduced(self, name: str, kind: str) -> Callable[[jax.Array], jax.Array]:
        weights, term = self.weights(kind), self.term(name)
        return lambda draft: losses.reduce_rows(term(draft), self.mask, weights)

    def compound(self, factors: dict[str, float], kind: str) -> Callable[[jax.Array], jax.Array]:
        weights = self.weights(kind)
        return lambda draft: losses.mixture(factors, draft, self.target, self.mask, weights)


def compute(fixture: Fixture) -> Outcome:
    """Compute every tensor whose name says what it is."""
    batch, outcome = _Batch(fixture), Outcome()
    same = np.asarray(jnp.all(batch.draft == batch.target, axis=-1, keepdims=True))
    for name in fixture.outputs or _usual_names():
        value = _one(name, batch, fixture)
        if value is None:
            continue
        outcome.tensors[name] = np.asarray(value)
        if name.endswith(".grad") and any(term in name for term in _OF_OVERLAP):
            outcome.ties[name] = np.broadcast_to(same, batch.draft.shape)
    return outcome


def _usual_names() -> list[str]:
    names = [f"{term}.{part}" for term in losses.TERMS for part in ("value", "grad")]
    names += [f"decay.{kind}" for kind in _WEIGHTS if kind != "none"]
    return names + [f"reduced.{term}.{kind}" for term in losses.TERMS for kind in _WEIGHTS]


def _one(name: str, batch: _Batch, fixture: Fixture) -> jax.Array | None:
    """Compute the tensor of this name, or return None if the name means nothing here."""
    stem, gradient = name.removesuffix(".grad"), name.endswith(".grad")
    terms, kinds = "|".join(losses.TERMS), "|".join(_WEIGHTS)
    if found := re.fullmatch(rf"({terms})(?:\.eta([\d.]+))?(\.value)?", stem):
        function = batch.term(found[1], float(found[2]) if found[2] else None)
    elif found := re.fullmatch(rf"reduced\.({terms})\.({kinds})", stem):
        function = batch.reduced(found[1], found[2])
    elif (found := re.fullmatch(rf"decay\.({kinds})", stem)) and not gradient:
        return batch.weights(found[1])
    elif re.fullmatch(rf"compound\.(({terms})[\d.]+_?)+", stem):
        parts = re.findall(rf"({terms})(\d+(?:\.\d+)?)", stem.removeprefix("compound."))
        said = re.search(rf"({kinds}) decay", fixture.meaning.get(name, ""))
        kind = said[1] if said else "dflash_from_anchor"
        function = batch.compound({term: float(factor) for term, factor in parts}, kind)
    else:
        return None
    if gradient:
        return jax.grad(lambda draft: jnp.sum(function(draft)))(batch.draft)
    return function(batch.draft)
