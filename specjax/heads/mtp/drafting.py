"""One round's drafts of MTP modules: first each module in turn, then the last one again and again.

Whatever is made of drafts lives here, in side buffers that end with the round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.heads.base import Borrowed
from specjax.heads.mtp.network import (
    MtpWeights,
    carry,
    context_at,
    draft_logits,
    joined,
    layer_input,
    side_block,
)
from specjax.layers.attention import KeyBlock

if TYPE_CHECKING:
    from specjax.heads.mtp.head import MtpHead, MtpState

PyTree = Any


class Chain:
    """One round's drafts, each from the one before; lives while a round is traced.

    Attributes:
        outputs: `[B, H]` of each draft so far, before the last norm.
        logits: `[B, V]` of each.
    """

    def __init__(
        self, head: MtpHead, params: MtpWeights, borrowed: Borrowed, state: MtpState
    ) -> None:
        """Start in front of the first draft."""
        self.outputs: list[jax.Array] = []
        self.logits: list[jax.Array] = []
        self._head, self._params, self._borrowed, self._state = head, params, borrowed, state
        self._drafts: list[jax.Array] = []
        self._window: jax.Array | None = None  # outputs of the newest module, made from drafts
        self._side: list[KeyBlock] = []  # of the last module

    def first(self) -> jax.Array:
        """Return the logits of the first draft."""
        return self._take(0, self._state.outputs[:, 0])

    def advance(self, k: int, token: jax.Array) -> jax.Array:
        """Return the logits of draft k + 1, given the token of draft k."""
        self._drafts.append(token)
        depth = k + 1
        if depth < self._head.modules:
            return self._take(depth, self._open(depth))
        return self._take(self._head.modules - 1, self._recycle(depth))

    def _take(self, depth: int, out: jax.Array) -> jax.Array:
        module = self._params.modules[depth]
        self.outputs.append(out)
        self.logits.append(draft_logits(self._head, module, self._borrowed, out))
        return self.logits[-1]

    def _open(self, depth: int) -> jax.Array:
        """Run module `depth` over the positions whose tokens are drafts."""
        head, state = self._head, self._state
        before, module = self._params.modules[depth - 1], self._params.modules[depth]
        kept = state.outputs[:, depth - 1 : depth]
        outs = kept if self._window is None else jnp.concatenate([kept, self._window], axis=1)
        positions = (state.lengths - depth)[:, None] + jnp.arange(depth)[None]
        tokens = jnp.stack(self._drafts, axis=1)
        states = carry(head, before, outs.astype(before.norm.dtype))
        x = layer_input(head, module, self._borrowed, states, tokens, positions)
        layout = self._borrowed.layout
        ctx = context_at(head.layer, state.cached(depth), positions, layout=layout)
        out, new = head.layer.run(module.layer, x, ctx, state.entries[depth], 0)
        self._window = out.astype(jnp.float32)
        self._side = [self._block(new, (positions >= 0)[:, None])]
        return out[:, -1]

    def _recycle(self, steps: int) -> jax.Array:
        """Run the last module on its own newest output, at the position after it."""
        head, state, last = self._head, self._state, self._head.modules - 1
        module = self._params.modules[last]
        token = self._drafts[-1][:, None]
        # Module 0's newest true position is p - 1, and so is the last one of every window.
        positions = (state.lengths + steps - 1 - last)[:, None]
        states = carry(head, module, self.outputs[-1][:, None].astype(module.norm.dtype))
        x = layer_input(head, module, self._borrowed, states, token, positions)
        side, layout = joined(self._side), self._borrowed.layout
        ctx = context_at(head.layer, state.cached(last), positions, side, layout)
        out, new = head.layer.run(module.layer, x, ctx, state.entries[last], 0)
        self._side.append(self._block(new, jnp.ones((token.shape[0], 1, 1), bool)))
        return out[:, 0]

    def _block(self, new: PyTree, mask: jax.Array) -> KeyBlock:
        return side_block(new, mask, jax.tree.leaves(self._state.entries)[0].dtype)
