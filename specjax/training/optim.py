"""Optimisers and learning rates from a configuration; optax does the work."""

from __future__ import annotations

from typing import Any

import jax
import optax

from specjax.training.config import OptimConfig

PyTree = Any


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the updates done, over a run of `steps`."""
    warmup = round(config.warmup * steps)
    rest = max(steps - warmup, 1)
    last = config.lr * config.final
    after = {
        "cosine": optax.cosine_decay_schedule(config.lr, rest, alpha=config.final),
        "linear": optax.linear_schedule(config.lr, last, rest),
        "constant": optax.constant_schedule(config.lr),
    }[config.schedule]
    if not warmup:
        return after
    # The first update counts as 0 done: start at one part, or it would change nothing.
    rise = optax.linear_schedule(config.lr / (warmup + 1), config.lr, warmup)
    return optax.join_schedules([rise, after], [warmup])


def optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Return clipping and the optimiser for a run of `steps` updates; it takes float32 leaves."""
    rate = schedule(config, steps)
    b1, b2 = config.betas
    if config.name == "muon":
        rule = optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            adam_b1=b1,
            adam_b2=b2,
            eps=config.eps,
        )
    else:
        rule = optax.adamw(
            rate, b1=b1, b2=b2, eps=config.eps, weight_decay=config.weight_decay, mask=_matrices
        )
    return optax.chain(optax.clip_by_global_norm(config.clip), rule) if config.clip else rule


def _matrices(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
