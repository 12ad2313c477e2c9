"""What a program costs one device, operation by operation."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(eq=False)
class Source:
    """Memory that is read.

    Attributes:
        most: bytes that can be read of it by one turn of the loops it is picked in.
        levels: in how many loops around the reader it is picked from.
    """

    most: float = math.inf
    levels: int = 0
    _outer: Source | None = None

    def outer(self) -> Source:
        """Return it as the loop around sees it."""
        if self._outer is None:
            self._outer = Source(self.most, self.levels - 1)
        return self._outer


@dataclasses.dataclass
class Site:
    """One operation, over all turns of the loops around it, on one device.

    Attributes:
        stage: of the round.
        what: the operation and the shapes of what it reads.
        flops: of products, by the dtype that they are computed in.
        reads: bytes read.
        written: bytes written.
        sent: bytes sent to other devices.
        steps: times that something waits for it.
        exchanges: times that devices wait for each other.
    """

    stage: str
    what: str
    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    reads: dict[Source, float] = dataclasses.field(default_factory=dict)
    written: float = 0.0
    sent: float = 0.0
    steps: float = 0.0
    exchanges: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes moved."""
        return sum(self.reads.values()) + self.written

    def looped(self, turns: int, waiting: bool) -> Site:
        """Return it inside a loop."""
        reads: dict[Source, float] = {}
        for source, read in self.reads.items():
            if source.levels > 0:
                outer = source.outer()
                reads[outer] = reads.get(outer, 0.0) + min(turns * read, source.most)
            else:
                reads[source] = reads.get(source, 0.0) + turns * read
        times = turns if waiting else min(turns, 1)
        return Site(
            self.stage,
            self.what,
            {dtype: turns * flops for dtype, flops in self.flops.items()},
            reads,
            turns * self.written,
            turns * self.sent,
            times * self.steps,
            times * self.exchanges,
        )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a program costs one device.

    Attributes:
        sites: its operations.
        temporaries: bytes of what is alive beside inputs and outputs at the worst moment: every
            intermediate array counts, also those that a compiler never makes; an upper estimate.
    """

    sites: tuple[Site, ...]
    temporaries: float

    def stage(self, *names: str) -> Cost:
        """Return the part of some stages of a round."""
        return Cost(tuple(site for site in self.sites if site.stage in names), self.temporaries)

    @property
    def flops(self) -> float:
        """FLOPs of products."""
        return sum(sum(site.flops.values()) for site in self.sites)

    @property
    def bytes(self) -> float:
        """Bytes moved between memory and compute units."""
        return sum(site.bytes for site in self.sites)

    @property
    def sent(self) -> float:
        """Bytes sent to other devices."""
        return sum(site.sent for site in self.sites)

    @property
    def exchanges(self) -> float:
        """Times that devices wait for each other."""
        return sum(site.exchanges for site in self.sites)

    @property
    def steps(self) -> float:
        """Operations one after another."""
        return sum(site.steps for site in self.sites)
