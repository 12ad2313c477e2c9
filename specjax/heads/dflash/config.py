"""What a configuration can say about DFlash and DSpark. Imports nothing heavy."""

import dataclasses
from typing import ClassVar, Literal, get_args

from specjax.core.errors import ConfigError
from specjax.heads.objective_config import Objective

LayerType = Literal["full", "sliding"]
MarkovHead = Literal["vanilla", "gated", "rnn"]
Layout = Literal["zlab", "deepspec", "speculators"]

_ZLAB = Objective(terms=("hard_ce",), weighting="dflash", gamma=7.0, normaliser="weights_eps")


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """A DFlash or DSpark head: its shape, and how it is trained.

    Attributes:
      taps: residual streams of the target that the head reads (0 is the embedding output); ()
        spreads as many as there are layers over the target, as z-lab does.
      block_size: slots of a block, the anchor's among them.
      sample_from_anchor: slot k predicts the token behind its own position (DeepSpec), so that a
        block drafts block_size tokens; off, the token at its position (z-lab), one draft fewer.
      mask_token_id: token that stands in the slots behind the anchor; one that no text contains.
      draft_vocab: file with the target ids that the head can draft; "" drafts any token.
      layers: decoder layers.
      layer_types: "full" or "sliding" for each layer; () makes all full.
      sliding_window: committed positions that a sliding layer sees.
      causal: layers whose slots see only slots before them: "sliding" ones, "none" or "all".
      body: "plain" layers with norms on queries and keys (Qwen3), or the target's own "gemma4"
        full-attention layers.
      heads: query heads; 0 takes the target's.
      kv_heads: key-value heads; 0 takes the target's.
      head_dim: size of a head; 0 takes the target's.
      mlp: width of the MLP; 0 takes the target's.
      markov_rank: rank of DSpark's sequential head; 0 leaves it out.
      markov_head: form of the sequential head.
      confidence: whether a confidence head estimates how likely drafts are to be accepted.
      confidence_with_markov: whether it also sees the sequential head's embedding of the token
        before.
      layout: published form the head is written in; "" takes the one that can express it.
      greedy_drafts: draft the most probable token in sampled rows too.
      num_anchors: blocks per text that are trained at a time, drawn at random.
      anchor_rule: where a block may start; "pair": at a supervised token before another
        (DeepSpec); "room": at any supervised token with a whole block behind it (speculators).
      supervise: slots that count; "prefix": those whose label is supervised, up to the first that
        is not (DeepSpec); "label": all whose label is (z-lab); "slot": all at a supervised
        position (speculators).
      objective: loss of the slots, see Objective.
      confidence_factor: of the confidence head's loss.
      detach_confidence: keep the confidence head's gradient away from everything else; off is
        what DeepSpec and speculators do.
      remat: compute a layer's activations anew in the backward pass instead of keeping them.
    """

    taps: tuple[int, ...] = ()
    block_size: int = 16
    sample_from_anchor: bool = False
    mask_token_id: int = -1
    draft_vocab: str = ""
    layers: int = 5
    layer_types: tuple[LayerType, ...] = ()
    sliding_window: int = 0
    causal: Literal["none", "sliding", "all"] = "sliding"
    body: Literal["plain", "gemma4"] = "plain"
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    mlp: int = 0
    markov_rank: int = 0
    markov_head: MarkovHead = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    layout: Literal["", "zlab", "deepspec", "speculators"] = ""
    greedy_drafts: bool = False
    num_anchors: int = 512
    anchor_rule: Literal["pair", "room"] = "pair"
    supervise: Literal["prefix", "label", "slot"] = "prefix"
    objective: Objective = _ZLAB
    confidence_factor: float = 1.0
    detach_confidence: bool = True
    remat: bool = True

    TRAINING: ClassVar[tuple[str, ...]] = (
        "num_anchors",
        "anchor_rule",
        "supervise",
        "objective",
        "confidence_factor",
        "detach_confidence",
        "remat",
    )
    """Settings of training: a head that is trained on takes them from the new run."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if self.block_size < (1 if self.sample_from_anchor else 2):
            raise ConfigError(f"DFlash.block_size {self.block_size} leaves no slot to draft from")
        if self.layers < 1:
            raise ConfigError(f"DFlash.layers must be at least 1, not {self.layers}")
        if self.layer_types and len(self.layer_types) != self.layers:
            raise ConfigError(
                f"DFlash.layer_types names {len(self.layer_types)} layers, DFlash.layers is"
                f" {self.layers}"
            )
        if "sliding" in self.layer_types and self.sliding_window < 1:
            raise ConfigError("DFlash.sliding_window must be positive where layers are sliding")
        if self.num_anchors < 1:
            raise ConfigError(f"DFlash.num_anchors must be at least 1, not {self.num_anchors}")
        if min(self.heads, self.kv_heads, self.head_dim, self.mlp, self.markov_rank) < 0:
            raise ConfigError(
                "DFlash.heads, kv_heads, head_dim, mlp and markov_rank must not be negative"
            )
        if self.markov_head not in get_args(MarkovHead):
            raise ConfigError(
                f"DFlash.markov_head {self.markov_head!r} does not exist; have"
                f" {', '.join(get_args(MarkovHead))}"
            )
        if self.confidence_with_markov and not self.markov_rank:
            raise ConfigError(
                "DFlash.confidence_with_markov needs a sequential head: set DFlash.markov_rank"
                " above 0, or DFlash.confidence_with_markov to False"
            )
        if self.confidence_with_markov and not self.confidence:
            raise ConfigError("DFlash.confidence_with_markov is on but DFlash.confidence is off")
