"""What the script that caches a target's features can be told beside the run they are for."""

from dataclasses import dataclass
from typing import Literal

from specjax.core.errors import ConfigError

Storage = Literal["bfloat16", "fp8"]


@dataclass(frozen=True)
class FeaturesConfig:
    """Which features of a target are cached, and how.

    Attributes:
        head: for whom: eagle3, dflash, dspark, mtp or gemma4_mtp, with its settings, or the folder
            of a released head. May be left out where `taps` or `reads` are given.
        taps: residual streams kept beside the head's own, so that one cache serves several heads.
        reads: layers whose keys and values are kept beside those the head reads.
        storage: bfloat16, or fp8: float8_e4m3 with a float32 scale per token and stream.
        chunk_mib: size of the files; the most that an interruption can cost.
        batch_size: conversations in a forward pass.
    """

    head: str = ""
    taps: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    storage: Storage = "bfloat16"
    chunk_mib: int = 256
    batch_size: int = 8

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        for name in ("chunk_mib", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Features.{name} must be at least 1, got {getattr(self, name)}")
        if not (self.head or self.taps or self.reads):
            raise ConfigError(
                "nothing says which features: set Features.head (--head) to the head that will be "
                "trained, or Features.taps"
            )
