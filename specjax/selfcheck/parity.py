"""Every family and every head on a device against the CPU: rounds, losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.round import Decoder, Weights, init_state, one_round, prefill_chunk
from specjax.heads.base import NullHead, TrainBatch, borrow
from specjax.selfcheck.operations import Check, run
from specjax.selfcheck.tiny import FAMILIES, HEADS, VOCAB, make_head, make_target

PyTree = Any
LIMIT = 1e-4  # float32 products, in whatever order a platform adds them up
_LANES, _PROMPT, _DRAFTS = 2, 12, 3


def programs(
    families: tuple[str, ...] = tuple(FAMILIES), heads: tuple[str, ...] = HEADS
) -> Iterator[tuple[str, Callable[..., Any], PyTree]]:
    """Iterate over (name, pure function, its arguments as host arrays)."""
    for family in families:
        target, params = make_target(family)
        yield f"round: {family}", *_round(target, NullHead(), params, ())
    for kind in heads:
        target, params = make_target("gemma4" if kind == "gemma4_mtp" else "llama")
        head, weights = make_head(kind, target, params)
        yield f"round: {kind} on {target.info.family}", *_round(target, head, params, weights)
        yield f"training: {kind} on {target.info.family}", *_loss(target, head, params, weights)


def _round(target: Any, head: Any, params: PyTree, weights: PyTree) -> tuple[Any, PyTree]:
    """Prompts taken in and two rounds decoded: tokens, lengths, and the caches' contents."""
    drafts = 0 if isinstance(head, NullHead) else _DRAFTS
    decoder = Decoder(target, head, drafts, target.info.stop_ids)
    rng = np.random.default_rng(5)
    prompts = rng.integers(3, VOCAB - 1, (_LANES, _PROMPT)).astype(np.int32)

    def go(both: Weights, prompts: jax.Array) -> Any:
        state = init_state(decoder, _LANES, 32, "float32")
        tokens = state.tokens.at[:, :_PROMPT].set(prompts)
        state = state.replace(tokens=tokens, budget=jnp.full(_LANES, 12))
        full, ends = jnp.full(_LANES, _PROMPT), jnp.full(_LANES, -1)
        state = prefill_chunk(decoder, both, state, prompts, full, ends)
        for _ in range(2):
            state = one_round(decoder, both, state)
        return state.tokens, state.lengths, state.accepted, state.cache, state.head

    return go, (Weights(target=params, head=weights), prompts)


def _loss(target: Any, head: Any, params: PyTree, weights: PyTree) -> tuple[Any, PyTree]:
    """The head's loss on a batch with the target's states, and its gradient."""
    rng = np.random.default_rng(6)
    tokens = rng.integers(3, VOCAB - 1, (_LANES, 16)).astype(np.int32)
    said = np.arange(16)[None] >= np.array([[4], [7]])

    def go(params: PyTree, weights: PyTree, tokens: jax.Array, said: jax.Array) -> Any:
        lengths = jnp.full(_LANES, 16, jnp.int32)
        out = target.forward(params, tokens, lengths, None, head.taps)
        batch = TrainBatch(
            tokens=tokens,
            loss_mask=said,
            lengths=lengths,
            hidden=out.hidden,
            taps=out.taps,
            key=jax.random.key(0),
            keys=target.entries(out.update, head.reads),
        )
        lent = borrow(target, params)
        loss = jax.value_and_grad(lambda w: head.loss(w, lent, batch)[0], allow_int=True)
        value, gradients = loss(weights)
        floats = [x for x in jax.tree.leaves(gradients) if jnp.issubdtype(x.dtype, jnp.floating)]
        return value, floats

    return go, (params, weights, tokens, said)


def parity(
    device: jax.Device,
    families: tuple[str, ...] = tuple(FAMILIES),
    heads: tuple[str, ...] = HEADS,
    on_check: Callable[[Check], None] = lambda check: None,
) -> list[Check]:
    """Run every program on the CPU and on a device, products in full precision.

    Args:
        device: what is checked.
        families: of targets.
        heads: kinds of heads.
        on_check: called with each comparison.
    """
    cpu = jax.devices("cpu")[0]
    found = []
    with jax.default_matmul_precision("highest"):
        for name, function, args in programs(families, heads):

            def on(where: jax.Device, function: Any = function, args: Any = args) -> Any:
                return jax.jit(function)(*jax.device_put(args, where))

            check = run(name, LIMIT, lambda on=on: on(device), lambda on=on: on(cpu))
            found.append(check)
            on_check(check)
    return found
