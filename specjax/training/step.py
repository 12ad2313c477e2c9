"""The compiled step: target forward, the head's loss, gradients and update in one program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.heads.base import TrainBatch, borrow
from specjax.layers.documents import Documents
from specjax.targets.base import Target
from specjax.training.partition import Leaves, Partition, cast_floats

PyTree = Any
HostBatch = dict[str, Any]
Metrics = dict[str, jax.Array]
_OF_NOISE = 1 << 20  # a fold of a batch's key that no head uses


@struct.dataclass
class TrainState:
    """Everything a step changes, and so all that a checkpoint needs beside the data position.

    Randomness is `fold_in(key(seed), step)`: step and seed are its whole state.

    Attributes:
        step: optimiser steps taken, skipped ones included.
        trained: float32 master weights by path.
        optimizer: optax state.
        skipped: steps that changed nothing because loss or gradients were not finite.
        average: running average of the weights, None where the run keeps none.
    """

    step: Int[Array, ""]
    trained: Leaves
    optimizer: PyTree
    skipped: Int[Array, ""]
    average: Leaves | None = None

    @property
    def result(self) -> Leaves:
        """The weights that are measured and exported."""
        return self.trained if self.average is None else self.average


@struct.dataclass
class Gathered:
    """Sums over the forward passes of an optimiser step, weighted by supervised tokens."""

    gradients: Leaves
    loss: Float[Array, ""]
    weight: Float[Array, ""]


@struct.dataclass
class Fixed:
    """What no step changes: the head's frozen leaves, and the target."""

    frozen: Leaves
    target: PyTree


def new_state(
    trained: Leaves, optimizer: optax.GradientTransformation, averaged: bool = False
) -> TrainState:
    """Return the state before the first step, with a running average of the weights or without."""
    zero = jnp.zeros((), jnp.int32)

    # Copies, for the state is donated: zero twice is one buffer, and the caller keeps its leaves.
    def copy() -> Leaves:
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), trained)

    average = copy() if averaged else None
    own = copy()
    return TrainState(zero, own, optimizer.init(own), jnp.zeros((), jnp.int32), average)


def nothing_gathered(trained: Leaves) -> Gathered:
    """Return empty sums."""
    return Gathered(jax.tree.map(jnp.zeros_like, trained), jnp.float32(0), jnp.float32(0))


def features(
    target: Target, target_params: PyTree, head: Any, batch: HostBatch, key: jax.Array
) -> TrainBatch:
    """Run the frozen target over a batch and keep what the head declared to want.

    Args:
        target: the target.
        target_params: its weights; states come in their dtype.
        head: says which residual streams and which layers' keys it wants.
        batch: "input_ids" `[B, S]` right padded, "loss_mask" `[B, S]`, "lengths" `[B]`; where rows
            pack several texts, "documents" and "positions" `[B, S]` besides (see `TrainBatch`).
            Where "features" (`Stored`) stand beside them, these are taken and no target runs.
        key: handed on to the loss.

    Returns:
        The batch as heads get it; no gradient flows into it.
    """
    if "features" in batch:
        dtype = target.input_embedding(target_params).dtype
        hidden, taps, keys = batch["features"].recall(head.taps, head.reads, dtype)
    else:
        texts = None
        if "documents" in batch:
            texts = Documents(batch["documents"], batch["positions"])
        out = target.forward(
            target_params, batch["input_ids"], batch["lengths"], None, head.taps, documents=texts
        )
        hidden, taps, keys = out.hidden, out.taps, target.entries(out.update, head.reads)
    return TrainBatch(
        tokens=batch["input_ids"],
        loss_mask=batch["loss_mask"],
        lengths=batch["lengths"],
        hidden=jax.lax.stop_gradient(hidden),
        taps=jax.lax.stop_gradient(taps),
        key=key,
        keys=jax.lax.stop_gradient(keys),
        documents=batch.get("documents"),
        positions=batch.get("positions"),
    )


class Steps:
    """The compiled functions of one run; one compilation of each per batch shape."""

    def __init__(
        self,
        target: Target,
        head: Any,
        partition: Partition,
        optimizer: optax.GradientTransformation,
        *,
        compute_dtype: str = "float32",
        seed: int = 0,
        noise: float = 0.0,
        ema: float = 0.0,
        places: TrainState | None = None,
    ) -> None:
        """Bind what is static. Weights are arguments of every call, never constants.

        Args:
            target: the frozen target.
            head: the head.
            partition: which of its leaves are trained.
            optimizer: their update.
            compute_dtype: of the head's products.
            seed: of everything random.
            noise: see `TrainerConfig.feature_noise`.
            ema: see `TrainerConfig.ema`; for states made with an average.
            places: shardings of the state, which it keeps from step to step; None leaves them to
                the compiler.
        """
        self._target = target
        self._head = head
        self._partition = partition
        self._optimizer = optimizer
        self._dtype = compute_dtype
        self._seed = seed
        self._noise = noise
        self._ema = ema
        self._places = places
        self.train: Callable[..., Any] = jax.jit(
            self._train, static_argnames="last", donate_argnums=(0, 1)
        )
        self.evaluate: Callable[..., Any] = jax.jit(self._evaluate)

    def _loss(self, trained: Leaves, fixed: Fixed, batch: TrainBatch) -> tuple[jax.Array, Metrics]:
        params = cast_floats(self._partition.join(trained, fixed.frozen), self._dtype)
        loss, metrics = self._head.loss(params, borrow(self._target, fixed.target), batch)
        return loss.astype(jnp.float32), metrics

    def _features(self, fixed: Fixed, batch: HostBatch, key: jax.Array) -> TrainBatch:
        found = features(self._target, fixed.target, self._head, batch, key)
        return found.replace(taps=found.taps.astype(self._dtype))

    def _train(
        self,
        state: TrainState,
        gathered: Gathered | None,
        fixed: Fixed,
        batch: HostBatch,
        part: Int[Array, ""],
        *,
        last: bool,
    ) -> tuple[TrainState, Gathered | None, Metrics]:
        """Take in one batch; with `last`, update the weights.

        Args:
            state: donated.
            gathered: sums of the batches before, donated; None if a step has one batch only.
            fixed: frozen weights.
            batch: see `features`.
            part: which batch of the step it is, for its random key.
            last: whether it is the step's last.

        Returns:
            (state, sums, metrics of this batch).
        """
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), state.step), part)
        supervised = jnp.sum(batch["loss_mask"], dtype=jnp.float32)
        grad = jax.value_and_grad(partial(self._loss), has_aux=True)
        found = self._features(fixed, batch, key)
        if self._noise:
            found = found.replace(taps=_noisy(found.taps, self._noise, key))
        (loss, metrics), gradients = grad(state.trained, fixed, found)
        metrics = {**metrics, "loss": loss, "supervised": supervised}
        if gathered is not None:
            gathered = Gathered(
                jax.tree.map(
                    lambda sums, new: sums + supervised * new, gathered.gradients, gradients
                ),
                gathered.loss + supervised * loss,
                gathered.weight + supervised,
            )
            if not last:
                return state, gathered, self._whole(metrics)
            weight = jnp.maximum(gathered.weight, 1)
            gradients = jax.tree.map(lambda sums: sums / weight, gathered.gradients)
            loss = gathered.loss
            gathered = nothing_gathered(state.trained)
        state, norm = self._update(state, gradients, loss)
        metrics = {**metrics, "gradient_norm": norm, "skipped": state.skipped}
        if self._places is not None:
            state = jax.lax.with_sharding_constraint(state, self._places)
        return state, gathered, self._whole(metrics)

    def _whole(self, metrics: Metrics) -> Metrics:
        """Metrics that every process can read."""
        if self._places is None:
            return metrics
        return jax.lax.with_sharding_constraint(metrics, self._places.step)

    def _update(
        self, state: TrainState, gradients: Leaves, loss: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        """Apply gradients, unless they or the loss are not finite: then only count."""
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in gradients.values()))
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, updates)

        def choose(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        state = TrainState(
            step=state.step + 1,
            trained=choose(trained, state.trained),
            optimizer=choose(optimizer, state.optimizer),
            skipped=state.skipped + jnp.where(finite, 0, 1),
            average=state.average,
        )
        if state.average is not None:
            # A constant decay would hold on to the random start for 1 / (1 - ema) steps.
            done = (state.step - state.skipped).astype(jnp.float32)
            decay = jnp.minimum(self._ema, (1 + done) / (10 + done))
            moved = jax.tree.map(
                lambda old, new: old + (1 - decay) * (new - old), state.average, state.trained
            )
            state = state.replace(average=choose(moved, state.average))
        return state, norm

    def _evaluate(self, state: TrainState, fixed: Fixed, batch: HostBatch) -> Metrics:
        """Return the metrics of a batch; the same random key every time."""
        found = self._features(fixed, batch, jax.random.key(self._seed))
        loss, metrics = self._loss(state.result, fixed, found)
        supervised = jnp.sum(batch["loss_mask"], dtype=jnp.float32)
        return self._whole({**metrics, "loss": loss, "supervised": supervised})


def _noisy(taps: Float[Array, "n B S H"], most: float, key: jax.Array) -> Float[Array, "n B S H"]:
    """Add uniform noise of at most `most` times each state's root mean square."""
    size = jnp.sqrt(jnp.mean(jnp.square(taps.astype(jnp.float32)), axis=-1, keepdims=True))
    drawn = jax.random.uniform(jax.random.fold_in(key, _OF_NOISE), taps.shape, minval=-1.0)
    return (taps.astype(jnp.float32) + most * size * drawn).astype(taps.dtype)
