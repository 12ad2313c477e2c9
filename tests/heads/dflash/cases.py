"""Tiny block heads, a target to draft for, and the network anew in float64 numpy."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.heads.base import Borrowed, DraftContext, Observation
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.drafting import run_block
from specjax.heads.dflash.head import DFlashHead, DFlashState
from specjax.heads.dflash.network import DFlashWeights, base_logits
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.cache.full import FullKind
from specjax.layers.rope import RopeConfig
from specjax.layers.sampling import Sampling
from specjax.targets.base import KeyLayer, TargetInfo

# Tests run each program once or twice: compile it quickly rather than well.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})

FIXTURES = Path(__file__).parents[2] / "fixtures"
VOCAB, HIDDEN, MASK = 40, 16, 39

DFLASH: dict[str, Any] = {"block_size": 5, "layers": 2, "mask_token_id": MASK, "taps": (1, 3, 5)}
DSPARK: dict[str, Any] = {
    **DFLASH,
    "sample_from_anchor": True,
    "markov_rank": 4,
    "confidence": True,
    "confidence_with_markov": True,
}
SLIDING: dict[str, Any] = {"layer_types": ("sliding", "full"), "sliding_window": 6}


def info(**changes: Any) -> TargetInfo:
    """Facts of a target of six layers with heads of another size than width / heads."""
    rope = RopeConfig(theta=10000.0, dims=12)
    block = BlockConfig(
        hidden=HIDDEN, heads=2, kv_heads=1, head_dim=12, mlp=24, eps=1e-5, rope=rope
    )
    facts = TargetInfo("llama", HIDDEN, VOCAB, 6, ("full",) * 6, (2,), 128, draft_block=block)
    return dataclasses.replace(facts, **changes)


def gemma_info(**changes: Any) -> TargetInfo:
    """Facts of a Gemma 4 target: scaled embeddings, capped logits, full layers of their own size.

    As Gemma's, its rotary factor is such that a few of the pairs turn.
    """
    scaling = (("factor", 1.0), ("partial_rotary_factor", 0.5))
    rope = RopeConfig(1e4, 8, "proportional", scaling)
    keys = KeyLayer(FullKind(1, 8, 8), rope)
    facts = info(
        family="gemma4_text", embed_scale=HIDDEN**0.5, softcap=5.0, key_layers=(None, keys) * 3
    )
    return dataclasses.replace(facts, **changes)


def borrowed(seed: int = 7, vocab: int = VOCAB, hidden: int = HIDDEN) -> Borrowed:
    """Weights of a tiny target that heads may use."""
    rng = np.random.default_rng(seed)
    return Borrowed(
        embedding=jnp.asarray(rng.normal(size=(vocab, hidden)), jnp.float32),
        output=jnp.asarray(rng.normal(size=(vocab, hidden)), jnp.float32),
    )


def tiny(
    settings: dict[str, Any],
    kept: np.ndarray | None = None,
    facts: TargetInfo | None = None,
    **changes: Any,
) -> tuple[DFlashHead, DFlashWeights]:
    """Return a fresh head whose weights do something, norms and biases included."""
    config = DFlashConfig(**{**settings, **changes})
    head = DFlashHead.for_target(facts or info(), config, None if kept is None else len(kept))
    params = head.init(jax.random.key(3), borrowed(), kept)
    rng = np.random.default_rng(5)

    def louder(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        size = 0.3 if x.ndim == 2 else 0.2
        return jnp.asarray(rng.normal(scale=size, size=x.shape) + (x.ndim == 1), x.dtype)

    own = dataclasses.replace(params, embedding=None, output=None)
    own = jax.tree.map(louder, own)
    return head, dataclasses.replace(own, embedding=params.embedding, output=params.output)


def states(rows: int, length: int, taps: int = 3, seed: int = 0) -> jax.Array:
    """Return tapped states `[n, B, T, H]`."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(taps, rows, length, HIDDEN)), jnp.float32)


def observation(taps: jax.Array, count: Any, start: Any) -> Observation:
    """Return what the target saw; a block head looks at no token."""
    _, batch, length, _ = taps.shape
    blank = jnp.zeros((batch, length), jnp.int32)
    return Observation(
        tokens=blank,
        next_tokens=blank,
        hidden=taps[0],
        taps=taps,
        count=jnp.broadcast_to(jnp.asarray(count, jnp.int32), (batch,)),
        start=jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,)),
    )


def context(state: DFlashState, anchor: Any = 3, sampling: Sampling | None = None) -> DraftContext:
    """Return the context of a round that follows what a state has taken in."""
    batch = state.lengths.shape[0]
    return DraftContext(
        anchor=jnp.broadcast_to(jnp.asarray(anchor, jnp.int32), (batch,)),
        position=state.lengths,
        tokens=jnp.zeros((batch, 1), jnp.int32),
        lengths=state.lengths + 1,
        sampling=sampling or Sampling.of(batch),
    )


def after(
    head: DFlashHead, params: DFlashWeights, taps: jax.Array, count: Any = None, capacity: int = 0
) -> DFlashState:
    """Return the state of a head that took in `taps` at once."""
    _, batch, length, _ = taps.shape
    state = head.init_state(batch, capacity or length + 8)
    seen = observation(taps, length if count is None else count, 0)
    return observe(head, params, borrowed(), state, seen)


# Compiled once for equal heads, whichever test asks.


@partial(jit, static_argnums=0)
def observe(
    head: DFlashHead, params: DFlashWeights, lent: Borrowed, state: DFlashState, seen: Observation
) -> DFlashState:
    """Take in committed positions."""
    return head.observe(params, lent, state, seen)


@partial(jit, static_argnums=(0, 5))
def draft(
    head: DFlashHead,
    params: DFlashWeights,
    lent: Borrowed,
    state: DFlashState,
    around: DraftContext,
    num: int,
) -> tuple[Any, Any]:
    """Draft, and return what was computed on the way."""
    return head.draft(params, lent, state, around, num)


@partial(jit, static_argnums=0)
def block(
    head: DFlashHead, params: DFlashWeights, lent: Borrowed, state: DFlashState
) -> tuple[jax.Array, jax.Array]:
    """Run a block with anchor 3: (states of its slots, logits of those that draft)."""
    anchor = jnp.full(state.lengths.shape, 3, jnp.int32)
    hidden = run_block(head, params, lent, state, anchor)
    return hidden, base_logits(head, params, lent, hidden[:, head.first_slot :])


def reference_hidden(
    head: DFlashHead,
    params: DFlashWeights,
    embedding: np.ndarray,
    taps: np.ndarray,
    anchor: int,
    visible: Any,
) -> np.ndarray:
    """Run a block of a head with plain layers, one slot and one head at a time.

    Args:
        head: gives sizes; nothing of its code runs.
        params: its weights.
        embedding: `[V, H]`.
        taps: `[n, P, H]` tapped states of the context.
        anchor: the block's first token, at position P.
        visible: (layer, slot, "context" or "slot", index) to whether it is seen.

    Returns:
        `[b, H]` after the final norm.
    """
    p: Any = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    block = head.geometry.block
    heads, kv, dim, eps = block.heads, block.kv_heads, block.head_dim, block.eps

    def norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + eps) * w

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        half = dim // 2
        angle = position * block.rope.theta ** (-np.arange(half) / half)
        a, b = x[:half], x[half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        )

    length, size = taps.shape[1], head.config.block_size
    c = [norm(p.fc @ taps[:, j].reshape(-1), p.hidden_norm) for j in range(length)]
    tokens = [anchor] + [head.config.mask_token_id] * (size - 1)
    slots = [embedding[t].astype(np.float64) * head.embed_scale for t in tokens]
    for i, w in enumerate(p.layers):
        a = w.attention

        def project(x: np.ndarray, at: int, a: Any = a) -> tuple[list, list]:
            k = [turn(norm(part, a.k_norm), at) for part in (a.k @ x).reshape(kv, dim)]
            return k, list((a.v @ x).reshape(kv, dim))

        normed = [norm(s, w.input_norm) for s in slots]
        known = [("context", j, *project(c[j], j)) for j in range(length)]
        known += [("slot", k, *project(normed[k], length + k)) for k in range(size)]
        out = []
        for k, x in enumerate(normed):
            seen = [entry for entry in known if visible(i, k, entry[0], entry[1])]
            mixed = []
            for h, raw in enumerate((a.q @ x).reshape(heads, dim)):
                q, n = turn(norm(raw, a.q_norm), length + k), h * kv // heads
                scores = np.array([q @ entry[2][n] for entry in seen]) / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                values = np.array([entry[3][n] for entry in seen])
                mixed.append(weights @ values / weights.sum())
            s = slots[k] + a.o @ np.concatenate(mixed)
            y = norm(s, w.post_norm)
            gate = w.mlp.gate @ y
            out.append(s + w.mlp.down @ (gate / (1 + np.exp(-gate)) * (w.mlp.up @ y)))
        slots = out
    return np.stack([norm(s, p.norm) for s in slots])
