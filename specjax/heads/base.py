"""What every draft head is, and the small records it exchanges with the decode loop.

A head sees a target through features (`Observation`) and through what it declared to borrow, never
through the target's code. Its two verbs in a round are `propose` (draft) and `observe` (take in
the states of the positions that were committed); in training it has a third, `loss`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.sharding import Layout
from specjax.layers.sampling import Sampling
from specjax.targets.base import Target

PyTree = Any


@struct.dataclass
class Observation:
    """True target states of newly committed positions, and the token that follows each.

    Attributes:
        tokens: `[B, T]` the tokens at positions start .. start + T - 1.
        next_tokens: `[B, T]` the token after each; the last counted one is the new anchor.
        hidden: `[B, T, H]` the target's states after its final norm.
        taps: `[n, B, T, H]` the tapped residual streams that the head declared.
        count: `[B]` how many of the T positions are committed (0: nothing happened in this row).
        start: `[B]` position of the first one.
    """

    tokens: Int[Array, "B T"]
    next_tokens: Int[Array, "B T"]
    hidden: Float[Array, "B T H"]
    taps: Float[Array, "n B T H"]
    count: Int[Array, " B"]
    start: Int[Array, " B"]


@struct.dataclass
class Borrowed:
    """Weights of the target that a head uses as its own.

    Attributes:
        embedding: `[V, H]` the input embedding.
        output: `[V, H]` the output layer.
        layout: how the target's weights lie on a mesh; None on one device. A head with experts of
            its own has them lie alike.
    """

    embedding: Float[Array, "V H"]
    output: Float[Array, "V H"]
    layout: Layout | None = struct.field(pytree_node=False, default=None)


def borrow(target: Target, params: PyTree) -> Borrowed:
    """Return the weights of a target that heads may use."""
    return Borrowed(
        embedding=target.input_embedding(params),
        output=target.output_weights(params),
        layout=target.layout,
    )


@struct.dataclass
class DraftContext:
    """What a head may look at when it drafts.

    Attributes:
        anchor: `[B]` the newest emitted token, whose target state does not exist yet.
        position: `[B]` the anchor's index in the sequence.
        tokens: `[B, S]` the sequence so far, right padded.
        lengths: `[B]` its length, anchor included.
        sampling: how the row samples.
        keys: cache entries of the target's layers that the head declared to read (`Head.reads`);
            `TargetInfo.key_layers` says how. They hold the `position` committed tokens alone.
    """

    anchor: Int[Array, " B"]
    position: Int[Array, " B"]
    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    sampling: Sampling
    keys: tuple[PyTree, ...] = ()


@struct.dataclass
class Proposal:
    """Drafts of one round.

    Attributes:
        tokens: `[B, K]` drafted token ids of the target's vocabulary.
        probs: `[B, K, V]` float32 distributions the drafts were drawn from, or None where each
            draft is a point mass. Rows that decode greedily are point masses whatever stands here.
        confidence: `[B, K]` estimated probability that a draft is accepted given that those
            before it were, or None.
        count: `[B]` how many of the K there are, from the first; None: all. The others are as if
            they had not been drafted.
    """

    tokens: Int[Array, "B K"]
    probs: Float[Array, "B K V"] | None = None
    confidence: Float[Array, "B K"] | None = None
    count: Int[Array, " B"] | None = None


@struct.dataclass
class TrainBatch:
    """Conversations with the target's states, as a head's `loss` gets them.

    Attributes:
        tokens: `[B, S]` token ids, right padded.
        loss_mask: `[B, S]` true where the token itself was said by the assistant; false on pads.
        lengths: `[B]` tokens per row; 0 for a row that only fills up the batch.
        hidden: `[B, S, H]` the target's states after its final norm.
        taps: `[n, B, S, H]` the tapped residual streams that the head declared.
        key: PRNG key of this batch, for heads that draw anchors or noise.
        keys: (keys, values) `[B, N, S, D]` of the target's layers that the head declared to read.
        documents: `[B, S]` document of each token where rows pack several, counted from 0 in each
            row (-1: padding). A document is contiguous, and nothing is predicted or attended to
            across its ends. None: a row is one text.
        positions: `[B, S]` positions for the rotary embedding, from 0 in each document; given
            exactly where `documents` is.
    """

    tokens: Int[Array, "B S"]
    loss_mask: Bool[Array, "B S"]
    lengths: Int[Array, " B"]
    hidden: Float[Array, "B S H"]
    taps: Float[Array, "n B S H"]
    key: Key[Array, ""]
    keys: tuple[tuple[jax.Array, jax.Array], ...] = ()
    documents: Int[Array, "B S"] | None = None
    positions: Int[Array, "B S"] | None = None


class Head(Protocol):
    """The interface of a draft head: a frozen, hashable dataclass with pure methods.

    Attributes:
        name: the algorithm's name in records: none, ngram, small_model, mtp, gemma4_mtp, eagle3,
            dflash, dspark.
        taps: residual streams of the target that `observe` wants.
        reads: layers of the target whose keys and values `propose` wants.
        max_tokens: most drafts a round can have, or None for any number.

    A head may have besides:
        max_context: longest text it drafts for; behind it decoding goes on without drafts.
        has_confidence: whether its proposals carry confidences of its own.
    """

    name: ClassVar[str]

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams wanted, in transformers' numbering (0 = embedding output)."""
        ...

    @property
    def reads(self) -> tuple[int, ...]:
        """Layers of the target whose cached keys and values it reads."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Most drafts a round can have, or None."""
        ...

    def specs(self) -> PyTree:
        """Return the head's own weights as a tree of ParamSpec."""
        ...

    def init_state(self, batch: int, capacity: int, dtype: str) -> PyTree:
        """Return the state before any token; every leaf has the rows on axis 0."""
        ...

    def observe(
        self, params: PyTree, borrowed: Borrowed, state: PyTree, obs: Observation
    ) -> PyTree:
        """Take in newly committed positions; rows with count 0 keep their state."""
        ...

    def propose(
        self, params: PyTree, borrowed: Borrowed, state: PyTree, context: DraftContext, num: int
    ) -> Proposal:
        """Draft `num` tokens per row; the state is only read."""
        ...


def longest_context(head: Head) -> int | None:
    """Return the length of text behind which a head does not draft, None if it does not say."""
    return getattr(head, "max_context", 0) or None


class NullHead:
    """The head that drafts nothing: decoding with it is the baseline, in the same engine."""

    name: ClassVar[str] = "none"
    taps: ClassVar[tuple[int, ...]] = ()
    reads: ClassVar[tuple[int, ...]] = ()
    max_tokens: ClassVar[int | None] = 0

    def __eq__(self, other: object) -> bool:
        """All null heads are the same static argument."""
        return isinstance(other, NullHead)

    def __hash__(self) -> int:
        """Hash by kind."""
        return hash(NullHead)

    def specs(self) -> PyTree:
        """It has no weights."""
        return ()

    def init_state(self, batch: int, capacity: int, dtype: str) -> PyTree:
        """It has no state."""
        del batch, capacity, dtype
        return ()

    def observe(
        self, params: PyTree, borrowed: Borrowed, state: PyTree, obs: Observation
    ) -> PyTree:
        """Nothing to take in."""
        del params, borrowed, obs
        return state

    def propose(
        self, params: PyTree, borrowed: Borrowed, state: PyTree, context: DraftContext, num: int
    ) -> Proposal:
        """Propose zero tokens."""
        del params, borrowed, state
        if num:
            raise ValueError("the null head drafts nothing; use num_speculative_tokens 0")
        return Proposal(tokens=jax.numpy.zeros((context.anchor.shape[0], 0), jax.numpy.int32))
