"""Settings of the decode engine."""

from __future__ import annotations

import dataclasses
from typing import Literal

from specjax.core.mesh_config import MeshConfig


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How the engine decodes; everything here is static.

    Attributes:
        num_speculative_tokens: drafts per round (K); 0 decodes without speculation.
        concurrency: lanes decoded together (B).
        capacity: longest prompt plus new tokens that a request may have; the caches are this
            long plus the drafts in flight. 0: the smallest that fits the requests at hand,
            rounded up to a multiple of 64.
        cache_dtype: dtype of the target's and the head's caches; "auto" is float32 on the CPU
            (where a bfloat16 write converts the whole buffer) and the weights' dtype elsewhere.
        prefill_chunk: longest piece of a prompt run at once; shorter ones are padded up to a
            power of two, so that prefill compiles once per such bucket.
        rounds_per_call: most rounds between two returns to the host (R). The loop also returns
            when a lane ends; latencies are read at those returns.
        draft_sampling: "sample" draws drafts as the request samples, "greedy" always drafts the
            head's argmax (a point mass; lossless too).
        verification: "fixed" verifies all drafts. The others verify those that the head is sure
            of: "early_stop" admits while it raises the expected throughput, "budget" as many over
            the batch as the round before would have wanted, "threshold" those of at least
            `confidence_threshold`. All are lossless.
        confidence_threshold: least confidence of a draft under "threshold".
        argmax_confidence: let a head without confidences of its own use the probability of its
            argmax; for argmax drafts only (greedy requests, or draft_sampling "greedy").
        verify_widths: up to three numbers of tokens, over the whole batch, at which the verify
            pass is compiled; the full width is added. () spreads four.
        mesh: devices that rounds are spread over: lanes over data and fsdp, the products of target
            and head over tensor, experts over expert.
        cost_table: JSON file of what drafting and verifying cost (`decode.costs`); "" profiles
            them at start-up.
    """

    num_speculative_tokens: int = 4
    concurrency: int = 1
    capacity: int = 0
    cache_dtype: str = "auto"
    prefill_chunk: int = 256
    rounds_per_call: int = 128
    draft_sampling: Literal["sample", "greedy"] = "sample"
    verification: Literal["fixed", "threshold", "early_stop", "budget"] = "fixed"
    confidence_threshold: float = 0.5
    argmax_confidence: bool = False
    verify_widths: tuple[int, ...] = ()
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    cost_table: str = ""
