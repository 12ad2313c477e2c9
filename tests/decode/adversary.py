"""Heads that draft to trip a target up, and a tiny random target of every family to be tripped."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import targets
from specjax.core.params import map_specs
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal
from specjax.layers.sampling import PURPOSE_DRAFT, Sampling, draw
from specjax.selfcheck.tiny import FAMILIES

VOCAB, WINDOW = 64, 8
CONFIGS: dict[str, dict[str, Any]] = {
    name: {
        key: VOCAB if key.startswith("vocab_size") else value
        for key, value in fields.items()
        if key != "eos_token_id"  # tests say themselves what ends a text
    }
    for name, fields in FAMILIES.items()
}


def tiny(
    name: str, loop: str = "unroll", seed: int = 3, **changes: Any
) -> tuple[targets.Target, Any]:
    """Return a family's tiny target and random weights that bfloat16 holds exactly.

    Norms are off their start, and the states of delta nets last for a dozen tokens.
    """
    how = targets.TargetConfig(layer_loop=loop)
    target = targets.from_config(CONFIGS[name] | changes, how)
    rng = np.random.default_rng(seed)

    def weight(spec: Any) -> jax.Array:
        start = -2.0 if spec.hf.endswith("A_log") else float(spec.init == "ones")
        drawn = rng.normal(start, 0.3, spec.shape).astype(jnp.bfloat16)
        return jnp.asarray(drawn, jnp.float32)

    return target, map_specs(weight, target.specs())


def trap(script: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Return drafts `[N, S, num]` for row n when it is s tokens long.

    Each is of one of four sorts: random tokens, the true continuation, a true prefix and then
    wrong tokens, wrong tokens only.

    Args:
        script: `[N, S]` every prompt with its true continuation.
        num: drafts per round K, at least 2.
        rng: where chance comes from.
    """
    rows, size = script.shape
    at = np.minimum(np.arange(size)[:, None] + np.arange(num), size - 1)
    true = script[:, at]
    wrong = (true + rng.integers(1, VOCAB, true.shape)) % VOCAB
    anything = rng.integers(0, VOCAB, true.shape)
    sort = rng.integers(0, 4, (rows, size, 1))
    good = np.choose(sort, [0, num, rng.integers(1, num, sort.shape), 0])
    drafts = np.where(np.arange(num) < good, true, np.where(sort == 0, anything, wrong))
    return drafts.astype(np.int32)


@struct.dataclass
class Traps:
    """The weights of `Adversary`.

    Attributes:
        first: `[N]` the token that each row's prompt begins with.
        drafts: `[N, S, K]` what to draft for row n when it is s tokens long.
    """

    first: jax.Array
    drafts: jax.Array


class _Forgetful:
    """What heads without weights of their own and without a state have in common."""

    name: ClassVar[str] = "ngram"
    taps: ClassVar[tuple[int, ...]] = ()
    max_tokens: ClassVar[int | None] = None
    reads: ClassVar[tuple[int, ...]] = ()

    def specs(self) -> Any:
        return ()

    def init_state(self, batch: int, capacity: int, dtype: str) -> Any:
        return ()

    def observe(self, params: Any, borrowed: Borrowed, state: Any, obs: Observation) -> Any:
        return state


@dataclasses.dataclass(frozen=True)
class Adversary(_Forgetful):
    """Drafts what its table says for this row at this length."""

    def propose(
        self, params: Any, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        row = jnp.argmax(params.first[None] == context.tokens[:, :1], axis=1)
        return Proposal(tokens=params.drafts[row, context.lengths, :num])


@dataclasses.dataclass(frozen=True)
class Gambler(_Forgetful):
    """Draws each draft from a law that depends on its place alone, whatever was said before.

    Its weights are logits `[S, V]`. A `certain` one drafts their argmax, a point mass.
    """

    certain: bool = False

    def propose(
        self, params: Any, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        sampling: Sampling = context.sampling
        if self.certain:
            sampling = sampling.replace(temperature=jnp.zeros_like(sampling.temperature))
        slots = [
            draw(params[context.lengths + k], sampling, context.lengths + k, PURPOSE_DRAFT + k)
            for k in range(num)
        ]
        tokens, probs = (jnp.stack(parts, axis=1) for parts in zip(*slots, strict=True))
        return Proposal(tokens=tokens, probs=None if self.certain else probs)
