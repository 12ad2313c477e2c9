"""The assistant's fixture, tiny heads on tiny targets, and rounds that the tests share."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core.params import map_specs
from specjax.heads.base import Borrowed, DraftContext, Observation, TrainBatch, borrow
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead, Gemma4MtpState
from specjax.io.hf import TensorReader
from specjax.layers.cache.full import FullKind
from specjax.layers.cache.window import WindowKind
from specjax.layers.rope import RopeConfig
from specjax.layers.sampling import Sampling
from specjax.targets import Target
from specjax.targets.base import KeyLayer, TargetInfo

# Tests run each program once or twice: compile it quickly rather than well.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})

FIXTURE = Path(__file__).parents[2] / "fixtures" / "gemma4_e2b_assistant"
PROPORTIONAL = (("factor", 1.0), ("partial_rotary_factor", 0.25))


def info(**changes: Any) -> TargetInfo:
    """Facts of the target behind the fixture: its last layers share what layers 2 and 3 keep."""
    sliding = KeyLayer(WindowKind(1, 8, 8, 6), RopeConfig(1e4, 8))
    full = KeyLayer(FullKind(1, 16, 16), RopeConfig(1e6, 16, "proportional", PROPORTIONAL))
    facts = TargetInfo(
        family="gemma4_text",
        hidden=32,
        vocab=144,
        num_layers=6,
        layer_kinds=("window", "full", "window", "full", "shared", "shared"),
        stop_ids=(1,),
        max_context=512,
        embed_scale=32**0.5,
        key_layers=(sliding, full, sliding, full, None, None),
    )
    return dataclasses.replace(facts, **changes)


def read(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a file."""
    reader = TensorReader(path)
    return {name: reader.read(name) for name in reader.shapes}


def random_weights(head: Gemma4MtpHead, borrowed: Borrowed, seed: int = 5) -> Any:
    """Fresh weights, off their start so that everything does something."""
    keys = iter(jax.random.split(jax.random.key(seed), 500))

    def louder(spec: Any, value: jax.Array) -> jax.Array:
        if spec.dtype:
            return value
        if spec.init == "ones":
            return value * (1 + 0.2 * jax.random.normal(next(keys), value.shape))
        return jax.random.normal(next(keys), value.shape) * 0.3

    return map_specs(louder, head.specs(), head.init(jax.random.key(seed), borrowed))


def on_target(target: Target, params: Any, **config: Any) -> tuple[Gemma4MtpHead, Any, Borrowed]:
    """Return (head, weights, what it borrows) for a target."""
    borrowed = borrow(target, params)
    settings = Gemma4MtpConfig(**{"hidden": 12, "mlp": 20, "layers": 3, **config})
    head = Gemma4MtpHead.for_target(target.info, settings)
    return head, random_weights(head, borrowed), borrowed


def from_scratch(
    target: Target, params: Any, head: Gemma4MtpHead, tokens: jax.Array, lengths: jax.Array
) -> tuple[Gemma4MtpState, DraftContext]:
    """Return state and context of a round whose anchors are the last of `lengths` tokens.

    Caches and state come from one pass over the committed tokens `[B, S]`.
    """
    batch, size = tokens.shape
    processed = lengths - 1
    out = target.forward(params, tokens, processed)
    cache = target.commit(target.init_cache(batch, size), out.update, processed)
    zeros = jnp.zeros_like(lengths)
    seen = Observation(tokens, tokens, out.hidden, out.taps, processed, zeros)
    state = head.observe((), None, head.init_state(batch, size), seen)  # type: ignore[arg-type]
    context = DraftContext(
        anchor=jnp.take_along_axis(tokens, processed[:, None], axis=1)[:, 0],
        position=processed,
        tokens=tokens,
        lengths=lengths,
        sampling=Sampling.of(batch),
        keys=target.entries(cache.layers, head.reads),
    )
    return state, context


def batch_of(
    target: Target, params: Any, head: Gemma4MtpHead, tokens: jax.Array, lengths: list[int]
) -> TrainBatch:
    """Return texts with the target's states and keys, as the trainer makes them."""
    valid = jnp.asarray(lengths, jnp.int32)
    at = jnp.arange(tokens.shape[1])[None]
    out = target.forward(params, tokens, valid, None, head.taps)
    return TrainBatch(
        tokens=tokens,
        loss_mask=(at >= 3) & (at < valid[:, None]),
        lengths=valid,
        hidden=out.hidden,
        taps=out.taps,
        key=jax.random.key(0),
        keys=target.entries(out.update, head.reads),
    )
