"""Settings of the decode engine."""

from __future__ import annotations

import dataclasses


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
    """

    num_speculative_tokens: int = 4
    concurrency: int = 1
    capacity: int = 0
    cache_dtype: str = "auto"
    prefill_chunk: int = 256
    rounds_per_call: int = 128
    draft_sampling: str = "sample"
