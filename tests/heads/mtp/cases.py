"""Tiny MTP heads of several families, and a module of ordinary layers anew in float64 numpy."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import targets
from specjax.core.params import map_specs
from specjax.heads.base import Borrowed, DraftContext, Observation
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead, MtpState
from specjax.heads.mtp.network import MtpWeights
from specjax.layers.sampling import Sampling
from specjax.targets.base import TargetInfo
from tests.decode.adversary import CONFIGS

# Tests run each program once or twice: compile it quickly rather than well.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})

FIXTURES = Path(__file__).parents[2] / "fixtures"
VOCAB, HIDDEN = 64, 32
# A sparse relative of the tiny Qwen3.5.
QWEN_MOE = CONFIGS["qwen3_5"] | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
TARGETS = {**CONFIGS, "qwen3_5_moe": QWEN_MOE}


def info(name: str, **changes: Any) -> TargetInfo:
    """Facts of a family's tiny target."""
    return dataclasses.replace(targets.from_config(TARGETS[name]).info, **changes)


def borrowed(seed: int = 7) -> Borrowed:
    """Weights of a tiny target that heads may use."""
    rng = np.random.default_rng(seed)
    return Borrowed(
        embedding=jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32),
        output=jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32),
    )


def tiny(name: str, seed: int = 3, **config: Any) -> tuple[MtpHead, MtpWeights, Borrowed]:
    """Return a head for a tiny target, with weights that do something, norms included."""
    head = MtpHead.for_target(info(name), MtpConfig(**config))
    rng = np.random.default_rng(seed)

    def weight(spec: Any) -> jax.Array:
        drawn = rng.normal(float(spec.init == "ones"), 0.25, spec.shape)
        return jnp.asarray(drawn, spec.dtype or "float32")

    return head, map_specs(weight, head.specs()), borrowed()


@dataclasses.dataclass(frozen=True)
class Texts:
    """Random texts: tokens `[B, S + 1]`, and the target's states `[B, S, H]`."""

    tokens: np.ndarray
    hidden: np.ndarray


def texts(rows: int, length: int, seed: int = 0) -> Texts:
    """Draw texts."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (rows, length + 1)).astype(np.int32)
    return Texts(tokens, rng.normal(size=(rows, length, HIDDEN)).astype(np.float32))


def observation(text: Texts, start: Any, count: Any, window: int, spoil: int = -1) -> Observation:
    """Return `window` positions of each row from `start` on, of which `count` are committed.

    With a seed in `spoil` the others are garbage, as rejected drafts leave it.
    """
    rows, length = text.hidden.shape[:2]
    start, count = (np.broadcast_to(np.asarray(x, np.int32), (rows,)) for x in (start, count))
    at = np.minimum(start[:, None] + np.arange(window), length - 1)
    after = np.take_along_axis(text.tokens, at + 1, axis=1)
    hidden = np.take_along_axis(text.hidden, at[..., None], axis=1)
    if spoil >= 0:
        rejected = np.arange(window) >= count[:, None]
        other = np.random.default_rng(spoil).integers(0, VOCAB, after.shape)
        after = np.where(rejected, other, after)
        hidden = np.where(rejected[..., None], 1e3, hidden)
    return Observation(
        tokens=jnp.asarray(np.take_along_axis(text.tokens, at, axis=1)),
        next_tokens=jnp.asarray(after, jnp.int32),
        hidden=jnp.asarray(hidden, jnp.float32),
        taps=jnp.zeros((0, rows, window, HIDDEN)),
        count=jnp.asarray(count),
        start=jnp.asarray(start),
    )


def context(state: MtpState, sampling: Sampling | None = None) -> DraftContext:
    """Return the context of a round that follows what a state has taken in."""
    batch = state.lengths.shape[0]
    return DraftContext(
        anchor=jnp.zeros(batch, jnp.int32),  # the head has seen it as the last next token
        position=state.lengths,
        tokens=jnp.zeros((batch, 1), jnp.int32),
        lengths=state.lengths + 1,
        sampling=sampling or Sampling.of(batch),
    )


def wide(x: Any) -> np.ndarray:
    """Return an array in float64."""
    return np.asarray(x, np.float64)


def numpy_norm(x: np.ndarray, w: Any, eps: float) -> np.ndarray:
    """Normalise the last axis."""
    return wide(w) * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _turn(x: np.ndarray, theta: float) -> np.ndarray:
    """Turn `[T, N, D]` at positions 0 .. T - 1, halves paired."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def numpy_module(
    head: MtpHead, weights: Any, lent: Borrowed, states: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run a module with an ordinary layer over one text: (output, the same normed, logits).

    States `[T, H]` and the token that goes with each; written from TARGETS.md, section 4.
    """
    block, eps = head.layer.block, head.eps
    embedded = wide(lent.embedding)[tokens] * head.embed_scale
    normed = numpy_norm(embedded, weights.embedding_norm, eps)
    joined = np.concatenate([normed, numpy_norm(states, weights.hidden_norm, eps)], axis=-1)
    x, layer = joined @ wide(weights.fc).T, weights.layer
    inside = numpy_norm(x, layer.input_norm, block.eps)

    def heads(w: Any) -> np.ndarray:
        return (inside @ wide(w).T).reshape(len(x), -1, block.head_dim)

    q, k = (_turn(heads(w), block.rope.theta) for w in (layer.attention.q, layer.attention.k))
    v = heads(layer.attention.v)
    group = block.heads // block.kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("tnd,snd->nts", q, k) * block.head_dim**-0.5
    scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
    mixing = np.exp(scores - scores.max(-1, keepdims=True))
    mixing /= mixing.sum(-1, keepdims=True)
    x = x + np.einsum("nts,snd->tnd", mixing, v).reshape(len(x), -1) @ wide(layer.attention.o).T
    inside = numpy_norm(x, layer.post_norm, block.eps)
    gate, up = (inside @ wide(w).T for w in (layer.mlp.gate, layer.mlp.up))
    out = x + (gate / (1 + np.exp(-gate)) * up) @ wide(layer.mlp.down).T
    normed = numpy_norm(out, weights.norm, eps)
    logits = normed @ wide(lent.output).T
    cap = head.softcap
    return out, normed, logits if cap is None else cap * np.tanh(logits / cap)


def numpy_drafts(
    head: MtpHead,
    params: MtpWeights,
    lent: Borrowed,
    hidden: np.ndarray,
    tokens: np.ndarray,
    num: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Draft greedily behind one text, everything from scratch: (tokens `[K]`, logits `[K, V]`).

    Every module runs over the whole window with tokens shifted once more; then the last module
    goes on over its window and its own outputs, as one longer text.

    Args:
        head: with an ordinary layer.
        params: its weights.
        lent: the target's matrices.
        hidden: `[p, H]` states of the committed positions.
        tokens: `[p + 1]` the text, the anchor at its end.
        num: drafts.
    """
    p, known = len(hidden), [int(t) for t in tokens]
    states, seen = wide(hidden), []
    window = states
    normed = head.config.carried == "normed"
    for k in range(num):
        depth = min(k, head.modules - 1)
        # Behind the modules: the last one's window, longer by what it handed on.
        window = states if k < head.modules else np.concatenate([window, states[-1:]])
        out, after, logits = numpy_module(
            head, params.modules[depth], lent, window, np.asarray(known[1 + depth :])
        )
        assert len(window) == p + max(k - head.modules + 1, 0)
        states = after if normed else out
        seen.append(logits[-1])
        known.append(int(logits[-1].argmax()))
    return np.asarray(known[p + 1 :]), np.stack(seen)
