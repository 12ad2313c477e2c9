"""DFlash and DSpark as draft heads: a cache of projected target states, one pass per block.

`observe` projects the states of committed positions to keys and values of every layer. `propose`
runs the block [anchor, mask, mask, ...] once over them; the slots' own keys are thrown away, so a
rejected draft leaves nothing behind. DSpark then goes through the slots left to right, each token
correcting the logits of the next slot.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from specjax.core.errors import ConfigError, PairingError
from specjax.core.params import map_specs
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal, TrainBatch
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.drafting import DraftPass, draft
from specjax.heads.dflash.fit import resolve
from specjax.heads.dflash.loss import training_loss
from specjax.heads.dflash.network import DFlashWeights, context_keys, fuse, weight_specs
from specjax.heads.vocabulary import init_over
from specjax.layers.blocks.geometry import Geometry
from specjax.layers.cache.full import FullKind
from specjax.layers.cache.window import WindowKind
from specjax.targets.base import TargetInfo

PyTree = Any


@struct.dataclass
class DFlashState:
    """What the head remembers of its rows.

    Attributes:
        layers: keys and values of the committed positions, one cache per layer.
        lengths: `[B]` how many positions.
    """

    layers: tuple[PyTree, ...]
    lengths: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class DFlashHead:
    """A block head without its weights: hashable, equal by value.

    Attributes:
        geometry: what its layers are.
        config: taps, block, windows, DSpark's parts, layout, and how it is trained; nothing in it
            is left open.
        vocab: size of the target's vocabulary.
        draft_vocab: how many tokens it can draft.
        target_hidden: width of the target.
        mapped: whether draft ids go through `d2t`.
        own_embedding: whether it has an embedding of its own.
        own_output: whether it has an output layer of its own; one it has is never replaced.
        target_layers: layers of the target.
        embed_scale: factor on embeddings, the target's.
        softcap: logits are `cap * tanh(logits / cap)` as the target's; None leaves them.
        temperatures: divide the confidences' logits, one per draft; () where not calibrated.
        max_context: longest context it is meant for; 0 if unknown.
    """

    geometry: Geometry
    config: DFlashConfig
    vocab: int
    draft_vocab: int
    target_hidden: int
    mapped: bool
    own_embedding: bool
    own_output: bool
    target_layers: int
    embed_scale: float = 1.0
    softcap: float | None = None
    temperatures: tuple[float, ...] = ()
    max_context: int = 0

    reads: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def for_target(
        cls, info: TargetInfo, config: DFlashConfig, draft_vocab: int | None = None
    ) -> DFlashHead:
        """Return a head to be trained for a target.

        Args:
            info: the target's facts.
            config: the head's shape and training; sizes it leaves open are the target's.
            draft_vocab: size of the draft vocabulary, None for the whole vocabulary.

        Raises:
            PairingError: taps, sizes or a mask token that do not fit the target.
            ConfigError: settings that go with no published layout, or no mask token.
        """
        geometry, config = resolve(info, config, draft_vocab)
        return cls(
            geometry=geometry,
            config=config,
            vocab=info.vocab,
            draft_vocab=info.vocab if draft_vocab is None else draft_vocab,
            target_hidden=info.hidden,
            mapped=draft_vocab is not None,
            own_embedding=config.layout != "zlab",
            own_output=config.layout != "zlab",
            target_layers=info.num_layers,
            embed_scale=info.embed_scale,
            softcap=info.softcap,
            max_context=info.max_context,
        )

    def __post_init__(self) -> None:
        """Refuse what would silently mean something else."""
        if self.draft_vocab != self.vocab and not self.mapped:
            raise PairingError(
                f"a draft vocabulary of {self.draft_vocab} of {self.vocab} tokens needs its maps "
                "d2t and t2d"
            )
        if not 0 <= self.config.mask_token_id < self.vocab:
            raise PairingError(
                f"mask_token_id {self.config.mask_token_id} is not a token of the target, which has"
                f" 0..{self.vocab - 1}"
            )
        if not (self.config.taps and self.config.layer_types and self.config.layout):
            raise ConfigError("a DFlash head needs taps, layer_types and a layout")
        if self.temperatures and len(self.temperatures) != self.max_tokens:
            raise ConfigError(
                f"{len(self.temperatures)} confidence temperatures for {self.max_tokens} drafts"
            )
        if min(self.temperatures, default=1.0) <= 0:
            raise ConfigError("confidence temperatures must be positive")

    @property
    def name(self) -> str:
        """The algorithm's name in records."""
        return "dspark" if self.config.markov_rank or self.config.confidence else "dflash"

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target that the head reads."""
        return self.config.taps

    @property
    def first_slot(self) -> int:
        """The first slot that drafts: the anchor's, unless slots predict their own position."""
        return 0 if self.config.sample_from_anchor else 1

    @property
    def max_tokens(self) -> int:
        """Drafts of a block; a longer one than the head was trained for means nothing."""
        return self.config.block_size - self.first_slot

    @property
    def has_confidence(self) -> bool:
        """Whether its proposals carry confidences of its own."""
        return self.config.confidence

    @property
    def window_from_anchor(self) -> bool:
        """Whether all slots of a block see the context from anchor - window on.

        So trains speculators; elsewhere the window ends at each slot's own position.
        """
        return self.config.layout == "speculators"

    def window(self, layer: int) -> int | None:
        """Return how far back a layer sees, None without a limit."""
        sliding = self.config.layer_types[layer] == "sliding"
        return self.config.sliding_window if sliding else None

    def causal(self, layer: int) -> bool:
        """Whether the slots of a layer see only those before them, and themselves."""
        sliding = self.window(layer) is not None
        return {"none": False, "sliding": sliding, "all": True}[self.config.causal]

    def cache(self, layer: int) -> FullKind | WindowKind:
        """Return what a layer keeps of the context."""
        window = self.window(layer)
        sizes = self.geometry.sizes
        return FullKind(*sizes) if window is None else WindowKind(*sizes, window)

    def specs(self) -> DFlashWeights:
        """Return the weight table."""
        return weight_specs(self)

    def trainable(self) -> DFlashWeights:
        """Return which weights training changes: a tree of bools like the weights.

        Embedding and output layer stay the target's, and so does Gemma's `layer_scalar`.
        """
        every = map_specs(
            lambda spec: not spec.dtype and not spec.hf.endswith("layer_scalar"), self.specs()
        )
        return dataclasses.replace(
            every,
            embedding=False if self.own_embedding else None,
            output=False if self.own_output else None,
        )

    def init(
        self,
        key: jax.Array,
        borrowed: Borrowed,
        kept: np.ndarray | None = None,
        dtype: str = "float32",
    ) -> DFlashWeights:
        """Draw fresh weights; embedding and output layer are the target's rows.

        Args:
            key: PRNG key.
            borrowed: the target's embedding and output layer.
            kept: `[Vd]` ascending target ids of the draft vocabulary, where there is one.
            dtype: of the weights.

        Raises:
            PairingError: `kept` is missing, superfluous, or not `draft_vocab` ascending ids.
        """
        return init_over(self.specs(), key, borrowed, kept, dtype)

    def init_state(self, batch: int, capacity: int, dtype: str = "float32") -> DFlashState:
        """Return the state before any token."""
        layers = range(self.config.layers)
        return DFlashState(
            layers=tuple(self.cache(i).empty(batch, capacity, dtype) for i in layers),
            lengths=jnp.zeros((batch,), jnp.int32),
        )

    def observe(
        self, params: DFlashWeights, borrowed: Borrowed, state: DFlashState, obs: Observation
    ) -> DFlashState:
        """Project the states of committed positions into the cache of every layer."""
        del borrowed
        positions = state.lengths[:, None] + jnp.arange(obs.tokens.shape[1])[None]
        new = context_keys(self, params, fuse(self, params, obs.taps), positions)
        layers = tuple(
            self.cache(i).write(entry, state.lengths, pair, obs.count)
            for i, (entry, pair) in enumerate(zip(state.layers, new, strict=True))
        )
        return DFlashState(layers=layers, lengths=state.lengths + obs.count)

    def propose(
        self,
        params: DFlashWeights,
        borrowed: Borrowed,
        state: DFlashState,
        context: DraftContext,
        num: int,
    ) -> Proposal:
        """Draft `num` tokens per row, the first of the block's."""
        return self.draft(params, borrowed, state, context, num)[0]

    def draft(
        self,
        params: DFlashWeights,
        borrowed: Borrowed,
        state: DFlashState,
        context: DraftContext,
        num: int,
    ) -> tuple[Proposal, DraftPass | None]:
        """Do what `propose` does, and return what was computed on the way (None without drafts).

        Raises:
            ConfigError: more drafts than a block has.
        """
        return draft(self, params, borrowed, state, context, num)

    def loss(
        self, params: DFlashWeights, borrowed: Borrowed, batch: TrainBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the training loss and its metrics; see `heads.dflash.loss`."""
        return training_loss(self, params, borrowed, batch)
