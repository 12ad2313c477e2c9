"""EAGLE-3 as a draft head: its own cache of true target states, and a chain of recycled states.

`observe` appends the pairs of committed positions; the output of the last one is kept, for the
first draft comes from it without a pass of its own. `propose` recycles outputs as states for the
other drafts; their keys live in a side buffer of the round and never enter the cache, so a
rejected draft leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.errors import PairingError
from specjax.core.params import map_specs
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal, TrainBatch
from specjax.heads.chain import draft_chain
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.loss import training_loss
from specjax.heads.eagle3.network import (
    Eagle3Weights,
    carry,
    draft_logits,
    fuse,
    layer_inputs,
    layer_output,
    weight_specs,
)
from specjax.heads.vocabulary import init_over, kept_ids
from specjax.layers.attention import KeyBlock
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.blocks.geometry import Geometry, PlainGeometry
from specjax.layers.cache import full
from specjax.targets.base import TargetInfo

Layout = Literal["safeai", "deepspec", "speculators"]


@struct.dataclass
class Eagle3State:
    """What the head remembers of its rows.

    Attributes:
        cache: keys and values of the pairs taken in so far.
        lengths: `[B]` how many.
        hidden: `[B, H]` float32 output of the last pair, before the final norm.
    """

    cache: full.FullCache
    lengths: Int[Array, " B"]
    hidden: Float[Array, "B H"]


@dataclasses.dataclass(frozen=True)
class Eagle3Head:
    """An EAGLE-3 head without its weights: hashable, equal by value.

    Attributes:
        geometry: its layer, plain or Gemma 4's; the attention reads twice the width.
        config: taps, switches of the network, and how it is trained.
        vocab: size of the target's vocabulary.
        draft_vocab: how many tokens it can draft.
        target_hidden: width of the target.
        mapped: whether draft ids go through `d2t`.
        own_embedding: whether it has an embedding of its own.
        own_output: whether it has an output layer of its own; one it has is never replaced.
        trained_output: whether training changes it.
        layout: the published form it is read from and written in.
        target_layers: layers of the target.
        max_context: longest context it is meant for; 0 if unknown.
        embed_scale: factor on embeddings, as the target has it.
        softcap: of the logits, as the target has it; None for none.
    """

    geometry: Geometry
    config: Eagle3Config
    vocab: int
    draft_vocab: int
    target_hidden: int
    mapped: bool
    own_embedding: bool
    own_output: bool
    trained_output: bool
    layout: Layout
    target_layers: int
    max_context: int = 0
    embed_scale: float = 1.0
    softcap: float | None = None

    name: ClassVar[str] = "eagle3"
    reads: ClassVar[tuple[int, ...]] = ()
    max_tokens: ClassVar[int | None] = None

    @classmethod
    def for_target(
        cls,
        info: TargetInfo,
        block: BlockConfig,
        config: Eagle3Config | None = None,
        draft_vocab: int | None = None,
    ) -> Eagle3Head:
        """Return a head to be trained for a target.

        With a draft vocabulary the head borrows the embedding and trains an output layer of its
        own (SafeAILab's form); without one it keeps frozen copies of both (DeepSpec's form). With
        any of the extra norms it takes the form of speculators: frozen copies, too.

        Args:
            info: the target's facts.
            block: the target's block, whose sizes hold where `config` gives none.
            config: switches and training.
            draft_vocab: size of the draft vocabulary, None for the whole vocabulary.

        Raises:
            PairingError: taps that the target does not have, or sizes that do not fit.
        """
        config = config or Eagle3Config()
        taps = tuple(config.taps) or default_taps(info.num_layers)
        check_taps(taps, info)
        heads, kv_heads = config.heads or block.heads, config.kv_heads or block.kv_heads
        if heads % kv_heads:
            raise PairingError(f"Eagle3: {heads} heads do not divide over {kv_heads} kv_heads")
        head_dim = config.head_dim or block.head_dim
        if head_dim != block.head_dim and block.rope.dims != block.head_dim:
            raise PairingError("Eagle3.head_dim cannot differ where the target rotates part of it")
        if draft_vocab is not None and not 0 < draft_vocab <= info.vocab:
            raise PairingError(f"a draft vocabulary of {draft_vocab} of {info.vocab} tokens")
        sized = dataclasses.replace(
            block,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=config.mlp or block.mlp,
            inputs=2 * info.hidden,
            rope=block.rope
            if head_dim == block.head_dim
            else dataclasses.replace(block.rope, dims=head_dim),
        )
        reduced = draft_vocab is not None
        layout: Layout = "safeai" if reduced else "deepspec"
        if has_extra_norms(config):
            layout = "speculators"
        return cls(
            geometry=PlainGeometry(sized),
            config=dataclasses.replace(config, taps=taps),
            vocab=info.vocab,
            draft_vocab=info.vocab if draft_vocab is None else draft_vocab,
            target_hidden=info.hidden,
            mapped=reduced,
            own_embedding=layout != "safeai",
            own_output=True,
            trained_output=layout == "safeai" and config.train_output,
            layout=layout,
            target_layers=info.num_layers,
            max_context=info.max_context,
            embed_scale=info.embed_scale,
            softcap=info.softcap,
        )

    def __post_init__(self) -> None:
        """Refuse a draft vocabulary without its map: its ids would silently mean others."""
        if self.draft_vocab != self.vocab and not self.mapped:
            raise PairingError(
                f"a draft vocabulary of {self.draft_vocab} of {self.vocab} tokens needs its maps "
                "d2t and t2d"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target that the head reads."""
        return self.config.taps

    def specs(self) -> Eagle3Weights:
        """Return the weight table."""
        return weight_specs(self)

    def trainable(self) -> Eagle3Weights:
        """Return which weights training changes: a tree of bools like the weights."""
        # Gemma's layer_scalar is stored, not trained.
        every = map_specs(
            lambda spec: not spec.dtype and not spec.hf.endswith("layer_scalar"), self.specs()
        )
        return dataclasses.replace(
            every,
            embedding=False if self.own_embedding else None,
            output=self.trained_output if self.own_output else None,
        )

    def init(
        self,
        key: jax.Array,
        borrowed: Borrowed,
        kept: np.ndarray | None = None,
        dtype: str = "float32",
    ) -> Eagle3Weights:
        """Draw fresh weights; embedding and output layer start as the target's rows.

        Args:
            key: PRNG key.
            borrowed: the target's embedding and output layer.
            kept: `[Vd]` ascending target ids of the draft vocabulary, where there is one.
            dtype: of the weights.

        Raises:
            PairingError: `kept` is missing, superfluous, or not `draft_vocab` ascending ids.
        """
        return init_over(self.specs(), key, borrowed, kept, dtype)

    def init_state(self, batch: int, capacity: int, dtype: str = "float32") -> Eagle3State:
        """Return the state before any token."""
        kv_heads, *sizes = self.geometry.sizes
        return Eagle3State(
            cache=full.empty(batch, kv_heads, capacity, *sizes, dtype),
            lengths=jnp.zeros((batch,), jnp.int32),
            hidden=jnp.zeros((batch, self.geometry.hidden), jnp.float32),
        )

    def observe(
        self, params: Eagle3Weights, borrowed: Borrowed, state: Eagle3State, obs: Observation
    ) -> Eagle3State:
        """Append the pairs of committed positions and keep the last one's output.

        A single layer's keys do not depend on its attention, so only the last counted row of
        each batch row attends.
        """
        length = obs.next_tokens.shape[1]
        h = fuse(self, params, obs.taps)
        positions = state.lengths[:, None] + jnp.arange(length)[None]
        residual, q, k, v = layer_inputs(self, params, borrowed, h, obs.next_tokens, positions)
        last = jnp.maximum(obs.count - 1, 0)
        new_mask = jnp.arange(length)[None, None, :] <= last[:, None, None]
        blocks = [
            KeyBlock(state.cache.k, state.cache.v, full.visible(state.cache, state.lengths)),
            KeyBlock(k, v, new_mask),
        ]
        residual = jnp.take_along_axis(residual, last[:, None, None], axis=1)
        q = jnp.take_along_axis(q, last[:, None, None, None], axis=2)
        out = layer_output(self, params, residual, q, blocks)[:, 0]
        moved = (obs.count > 0)[:, None]
        return Eagle3State(
            cache=full.write(state.cache, state.lengths, k, v, obs.count),
            lengths=state.lengths + obs.count,
            hidden=jnp.where(moved, out.astype(jnp.float32), state.hidden),
        )

    def propose(
        self,
        params: Eagle3Weights,
        borrowed: Borrowed,
        state: Eagle3State,
        context: DraftContext,
        num: int,
    ) -> Proposal:
        """Draft `num` tokens per row: one from the kept output, the others by recycling."""
        return self.draft(params, borrowed, state, context, num)[0]

    def draft(
        self,
        params: Eagle3Weights,
        borrowed: Borrowed,
        state: Eagle3State,
        context: DraftContext,
        num: int,
    ) -> tuple[Proposal, list[jax.Array], list[jax.Array]]:
        """Do what `propose` does, and return each draft's output and logits too.

        Returns:
            (proposal, outputs before the final norm `[B, H]` each, logits `[B, Vd]` each).
        """
        outs = [state.hidden.astype(params.fc.dtype)]
        seen: list[jax.Array] = []
        buffer: list[tuple[jax.Array, jax.Array]] = []
        cached = KeyBlock(state.cache.k, state.cache.v, full.visible(state.cache, state.lengths))

        def logits() -> jax.Array:
            seen.append(draft_logits(self, params, borrowed, outs[-1]))
            return seen[-1]

        def advance(k: int, token: jax.Array) -> jax.Array:
            h = carry(self, params, outs[-1])[:, None]
            positions = (state.lengths + k)[:, None]
            residual, q, *new = layer_inputs(self, params, borrowed, h, token[:, None], positions)
            buffer.append((new[0], new[1]))
            keys, values = (jnp.concatenate(part, axis=2) for part in zip(*buffer, strict=True))
            own = KeyBlock(keys, values, jnp.ones((1, 1, k + 1), bool))
            outs.append(layer_output(self, params, residual, q, [cached, own])[:, 0])
            return logits()

        proposal = draft_chain(
            logits,
            advance,
            num,
            context,
            vocab=self.vocab,
            kept=kept_ids(params),
            point_mass=self.config.greedy_drafts,
        )
        return proposal, outs[:num], seen

    def loss(
        self, params: Eagle3Weights, borrowed: Borrowed, batch: TrainBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the training-time-test loss and its metrics; see `heads.eagle3.loss`."""
        return training_loss(self, params, borrowed, batch)


def has_extra_norms(config: Eagle3Config) -> bool:
    """Whether the network has one of the norms that only speculators' form can express."""
    return (
        config.norm_before_residual or config.norm_before_fc or config.fc_norm or config.norm_output
    )


def default_taps(layers: int) -> tuple[int, int, int]:
    """Return the taps of SafeAILab's heads, which their configurations do not state."""
    return 2, layers // 2, layers - 3


def check_taps(taps: tuple[int, ...], info: TargetInfo) -> None:
    """Refuse taps outside 0..L.

    Raises:
        PairingError: naming them.
    """
    wrong = [tap for tap in taps if not 0 <= tap <= info.num_layers]
    if wrong or not taps:
        raise PairingError(
            f"the head taps layers {list(taps)}; the target has residual streams 0.."
            f"{info.num_layers}"
        )
