"""The cache of a gated delta-net layer: a state of fixed size and the convolution's last inputs.

Nothing can be cut back from a state, so a forward pass does not write one. It returns what each
new token adds to it (`RecurrentUpdate`), which does not depend on the tokens after it; to commit
the first n tokens is then one masked product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class RecurrentCache:
    """What one layer knows of its past, per row.

    Attributes:
        state: `[B, M, D, E]` float32, M the number of value heads, keys before values.
        tail: `[B, K-1, C]` the last inputs of the convolution, the newest at the end; zeros stand
            in front of a text.
    """

    state: Float[Array, "B M D E"]
    tail: Float[Array, "B J C"]

    AXES: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "state": ("batch", "heads", None, None),
        "tail": ("batch", None, None),
    }


@struct.dataclass
class RecurrentUpdate:
    """What T new tokens would do to the cache.

    Token j turns the state S into `e^{log_decay_j} S + k_j w_j^T`. Decays are kept per token, not
    summed from the start: the difference of two long sums would lose the digits of a short one.

    Attributes:
        k: `[B, N, T, D]` float32 keys, N the number of key heads.
        w: `[B, M, T, E]` float32, `beta_j (v_j - S_j^T k_j)`: what is new in the value, seen from
            the state S_j that the token finds after its decay. 0 for pads.
        log_decay: `[B, M, T]` float32, at most 0; 0 for pads.
        u: `[B, T, C]` inputs of the convolution.
    """

    k: Float[Array, "B N T D"]
    w: Float[Array, "B M T E"]
    log_decay: Float[Array, "B M T"]
    u: Float[Array, "B T C"]


@dataclasses.dataclass(frozen=True)
class RecurrentKind:
    """The cache of a layer that sums up its past in a state.

    Attributes:
        key_heads: N.
        value_heads: M, a multiple of N; value head m goes with key head `m // (M / N)`.
        key_dim: size of a key D.
        value_dim: size of a value E.
        conv_kernel: taps K of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    name: ClassVar[str] = "recurrent"

    @property
    def channels(self) -> int:
        """Channels C of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def empty(self, batch: int, capacity: int, dtype: str) -> RecurrentCache:
        """Return the cache of `batch` empty texts; it does not grow, so any capacity will do."""
        del capacity
        return RecurrentCache(
            state=jnp.zeros((batch, self.value_heads, self.key_dim, self.value_dim), jnp.float32),
            tail=jnp.zeros((batch, self.conv_kernel - 1, self.channels), dtype),
        )

    def write(
        self,
        entry: RecurrentCache,
        lengths: Int[Array, " B"],
        new: RecurrentUpdate,
        n: Int[Array, " B"],
    ) -> RecurrentCache:
        """Commit the first `n[b]` new tokens of row b; 0 leaves the row as it is.

            S = e^{L(0, n)} S + sum_{j < n} e^{L(j+1, n)} k_j w_j^T

        with L(i, n) the sum of the log decays i to n-1.
        """
        del lengths  # the state holds no positions
        taken = (jnp.arange(new.k.shape[2]) < n[:, None])[:, None]
        log_decay = jnp.where(taken, new.log_decay, 0.0)
        w = jnp.where(taken[..., None], new.w, 0.0)
        return RecurrentCache(
            state=advance(entry.state, new.k, w, log_decay), tail=_shift(entry.tail, new.u, n)
        )

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the memory that one committed token takes: none."""
        del itemsize
        return 0

    def bytes_fixed(self, itemsize: int) -> int:
        """Return the memory of a row: the float32 state, and the tail in the run's dtype."""
        state = self.value_heads * self.key_dim * self.value_dim * 4
        return state + (self.conv_kernel - 1) * self.channels * itemsize


def advance(
    state: Float[Array, "B M D E"],
    k: Float[Array, "B N T D"],
    w: Float[Array, "B M T E"],
    log_decay: Float[Array, "B M T"],
) -> Float[Array, "B M D E"]:
    """Return the states after T tokens; one with `w` and `log_decay` 0 does nothing."""
    # Summed from the newest token back: the tokens that count most have the shortest sums.
    decays = jax.lax.cumsum(log_decay, axis=2, reverse=True)
    later = jnp.pad(decays[:, :, 1:], [(0, 0), (0, 0), (0, 1)])  # of the tokens behind each
    kept = jnp.exp(later)[..., None] * w
    kept = kept.reshape(*kept.shape[:1], k.shape[1], -1, *kept.shape[2:])
    added = jnp.einsum("bntd,bnrte->bnrde", k, kept, precision=jax.lax.Precision.HIGHEST)
    return jnp.exp(decays[:, :, 0, None, None]) * state + added.reshape(state.shape)


def _shift(
    tail: Float[Array, "B J C"], u: Float[Array, "B T C"], n: Int[Array, " B"]
) -> Float[Array, "B J C"]:
    """Return rows n to n+J-1 of `[tail | u]`, without building that."""
    size = tail.shape[1]
    row = n[:, None] + jnp.arange(size)
    old = jnp.take_along_axis(tail, jnp.minimum(row, size - 1)[..., None], axis=1)
    fresh = jnp.take_along_axis(u, jnp.maximum(row - size, 0)[..., None], axis=1)
    return jnp.where((row < size)[..., None], old, fresh.astype(tail.dtype))
