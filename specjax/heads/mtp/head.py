"""Native MTP as a draft head: modules with caches of true states, and a chain of recycled ones.

Module k (from 0) at index t takes module k - 1's output at t (module 0: the target's state h_t)
and the token x_{t+1+k}. With p committed positions and the anchor x_p, module k can so far have
run for t < p - k: those entries are its cache, and its newest output is kept beside it.

`observe` appends n positions: to every module the same n next tokens, and to module k the outputs
of module k - 1, moved back by one (its kept output first). `propose` gives the first draft from
module 0's kept output; module k then runs over the k indices t = p - k .. p - 1 whose tokens are
drafts, the last of which gives draft k + 1. Further drafts run the last module on its own output,
one position on each time. All entries made from drafts live in side buffers of the round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.errors import ConfigError, PairingError
from specjax.core.params import init_params, map_specs
from specjax.heads.base import Borrowed, DraftContext, Observation, Proposal, TrainBatch
from specjax.heads.chain import draft_chain
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.drafting import Chain
from specjax.heads.mtp.loss import training_loss
from specjax.heads.mtp.network import MtpWeights, carry, last_output, layer_input, weight_specs
from specjax.layers.blocks.dense import DenseLayer
from specjax.layers.cache.full import FullKind
from specjax.layers.cache.latent import LatentKind
from specjax.layers.context import Context
from specjax.layers.layer_kind import LayerKind
from specjax.targets.base import TargetInfo

PyTree = Any


@struct.dataclass
class MtpState:
    """What the head remembers of its rows.

    Attributes:
        entries: cache of each module.
        lengths: `[B]` committed positions p; module k has cached max(p - k, 0) of them.
        outputs: `[B, M, H]` float32, each module's newest output before its last norm.
    """

    entries: tuple[PyTree, ...]
    lengths: Int[Array, " B"]
    outputs: Float[Array, "B M H"]

    def cached(self, depth: int) -> Int[Array, " B"]:
        """Return how many positions a module has cached."""
        return jnp.maximum(self.lengths - depth, 0)


@dataclasses.dataclass(frozen=True)
class MtpHead:
    """MTP modules without their weights: hashable, equal by value.

    Attributes:
        layer: the decoder layer of a module.
        config: number of modules, what is handed on, and how they are trained.
        hidden: width H, the target's.
        vocab: size of the target's vocabulary.
        eps: of the norms.
        family: `model_type` of the target.
        norm_offset: norm weights are stored as an offset from 1.
        embed_scale: factor on embeddings, the target's.
        softcap: of the logits, the target's; None for none.
        max_context: longest context it is meant for; 0 if unknown.
    """

    layer: LayerKind
    config: MtpConfig
    hidden: int
    vocab: int
    eps: float
    family: str
    norm_offset: bool = False
    embed_scale: float = 1.0
    softcap: float | None = None
    max_context: int = 0

    name: ClassVar[str] = "mtp"
    taps: ClassVar[tuple[int, ...]] = ()
    reads: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def for_target(
        cls, info: TargetInfo, config: MtpConfig | None = None, layer: LayerKind | None = None
    ) -> MtpHead:
        """Return modules for a target: those of its checkpoint, or new ones to be trained.

        Args:
            info: the target's facts.
            config: settings; the number of modules that it leaves open is the target's.
            layer: of the modules; None takes the target's own MTP layer, or where the family has
                none an ordinary block of the target's sizes.

        Raises:
            PairingError: nothing says what a module's layer is, or it cannot be one.
        """
        config = config or MtpConfig()
        if info.draft_block is None:
            raise PairingError(f"a {info.family} target names no block that an MTP module can copy")
        modules = config.modules or info.draft_modules or 1
        return cls(
            layer=layer or info.draft_layer or DenseLayer(info.draft_block),
            config=dataclasses.replace(config, modules=modules),
            hidden=info.hidden,
            vocab=info.vocab,
            eps=info.draft_block.eps,
            family=info.family,
            norm_offset=info.norm_offset,
            embed_scale=info.embed_scale,
            softcap=info.softcap,
            max_context=info.max_context,
        )

    def __post_init__(self) -> None:
        """Refuse layers whose past cannot stand in a side buffer, and no modules at all."""
        if not isinstance(self.layer.cache, FullKind | LatentKind):
            raise PairingError(
                f"an MTP module needs a layer that caches every position, not a {self.layer.label}"
                " one"
            )
        if self.config.modules < 1:
            raise ConfigError("an MTP head has at least one module (Mtp.modules)")

    @property
    def modules(self) -> int:
        """Number of modules."""
        return self.config.modules

    @property
    def max_tokens(self) -> int | None:
        """Most drafts of a round: any number where the last module is used again."""
        return None if self.config.reuse else self.modules

    @property
    def cache(self) -> FullKind | LatentKind:
        """What a module keeps of every position."""
        kind = self.layer.cache
        assert isinstance(kind, FullKind | LatentKind)  # __post_init__ refuses others
        return kind

    def specs(self) -> MtpWeights:
        """Return the weight table, under the names of a file of its own."""
        return weight_specs(self)

    def trainable(self) -> MtpWeights:
        """Return which weights training changes: all but the corrections of a router's choice.

        These are set by the load of the experts, never by a gradient.
        """
        return map_specs(lambda spec: not spec.hf.endswith("e_score_correction_bias"), self.specs())

    def init(self, key: jax.Array, borrowed: Borrowed, dtype: str = "float32") -> MtpWeights:
        """Draw fresh weights.

        Args:
            key: PRNG key.
            borrowed: the target's embedding and output layer, which stay its own.
            dtype: of the weights.

        Raises:
            PairingError: these are of another target.
        """
        if borrowed.embedding.shape != (self.vocab, self.hidden):
            raise PairingError(
                f"MTP modules for an embedding [{self.vocab}, {self.hidden}] got one of"
                f" {list(borrowed.embedding.shape)}"
            )
        return init_params(self.specs(), key, dtype)

    def init_state(self, batch: int, capacity: int, dtype: str = "float32") -> MtpState:
        """Return the state before any token."""
        return MtpState(
            entries=tuple(self.cache.empty(batch, capacity, dtype) for _ in range(self.modules)),
            lengths=jnp.zeros((batch,), jnp.int32),
            outputs=jnp.zeros((batch, self.modules, self.hidden), jnp.float32),
        )

    def observe(
        self, params: MtpWeights, borrowed: Borrowed, state: MtpState, obs: Observation
    ) -> MtpState:
        """Append committed positions to every module."""
        entries, outputs = [], []
        states, tokens, count = obs.hidden, obs.next_tokens, obs.count
        length = tokens.shape[1]
        for k, (module, entry) in enumerate(zip(params.modules, state.entries, strict=True)):
            cached = state.cached(k)
            if k:
                states, tokens, count = _deeper(state, k, states, obs)
            positions = cached[:, None] + jnp.arange(length)[None]
            x = layer_input(self, module, borrowed, states, tokens, positions)
            last = jnp.maximum(count - 1, 0)
            if k + 1 < self.modules:  # the next module wants every output
                ctx = Context.of(cached, count, length, self.layer.ropes, layout=borrowed.layout)
                out, new = self.layer.run(module.layer, x, ctx, entry, 0)
                newest = jnp.take_along_axis(out, last[:, None, None], axis=1)
                kept = state.outputs[:, k : k + 1].astype(out.dtype)
                # One more in front: the output before the first new one.
                states = carry(self, module, jnp.concatenate([kept, out], axis=1))
            else:
                newest, new = last_output(
                    self.layer, module.layer, x, entry, cached, last, borrowed.layout
                )
            moved = (count > 0)[:, None]
            newest = newest[:, 0].astype(jnp.float32)
            outputs.append(jnp.where(moved, newest, state.outputs[:, k]))
            entries.append(self.cache.write(entry, cached, new, count))
        return MtpState(
            entries=tuple(entries),
            lengths=state.lengths + obs.count,
            outputs=jnp.stack(outputs, axis=1),
        )

    def propose(
        self,
        params: MtpWeights,
        borrowed: Borrowed,
        state: MtpState,
        context: DraftContext,
        num: int,
    ) -> Proposal:
        """Draft `num` tokens per row."""
        return self.draft(params, borrowed, state, context, num)[0]

    def draft(
        self,
        params: MtpWeights,
        borrowed: Borrowed,
        state: MtpState,
        context: DraftContext,
        num: int,
    ) -> tuple[Proposal, list[jax.Array], list[jax.Array]]:
        """Do what `propose` does, and return each draft's output and logits too.

        Returns:
            (proposal, outputs before the last norm `[B, H]` each, logits `[B, V]` each).

        Raises:
            ConfigError: more drafts than modules, and the last is not to be used again.
        """
        if self.max_tokens is not None and num > self.max_tokens:
            raise ConfigError(
                f"{num} drafts per round of {self.modules} MTP modules with Mtp.reuse off; at most"
                f" {self.max_tokens}"
            )
        chain = Chain(self, params, borrowed, state)
        proposal = draft_chain(
            chain.first,
            chain.advance,
            num,
            context,
            vocab=self.vocab,
            point_mass=self.config.greedy_drafts,
        )
        return proposal, chain.outputs, chain.logits

    def loss(
        self, params: MtpWeights, borrowed: Borrowed, batch: TrainBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the training loss and its metrics; see `heads.mtp.loss`."""
        return training_loss(self, params, borrowed, batch)


def _deeper(
    state: MtpState, depth: int, states: Float[Array, "B U H"], obs: Observation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (states, tokens, count) of a module's new positions.

    Args:
        state: before them.
        depth: the module's k, at least 1.
        states: `[B, 1 + T, H]` what module k - 1 hands on: of its newest old position, then of its
            new ones.
        obs: the new positions of module 0.
    """
    at = jnp.arange(obs.next_tokens.shape[1])[None]
    # In a text of at most k positions the module has not started yet: tokens are skipped.
    skipped = jnp.maximum(depth - state.lengths, 0)
    started = (state.lengths >= depth).astype(jnp.int32)
    tokens = jnp.take_along_axis(
        obs.next_tokens, jnp.minimum(at + skipped[:, None], at.shape[1] - 1), axis=1
    )
    states = jnp.take_along_axis(states, (at + 1 - started[:, None])[..., None], axis=1)
    return states, tokens, jnp.maximum(obs.count - skipped, 0)
