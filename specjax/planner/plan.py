"""The plan: what fits, what a round takes, and what speculation brings, over its settings.

Rounds are traced at a few numbers of drafts, at every number of lanes, and at the shortest and the
longest context; in between seconds and bytes are interpolated, as `specjax tune` does between the
rounds that it times. Expected tokens per second are lanes * (tokens per round) / (seconds per
round); speedup is against the same engine without a head. Prompts are not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specjax.core.errors import ConfigError
from specjax.evaluation.prediction import Profile
from specjax.planner import acceptance as profiles
from specjax.planner import chips
from specjax.planner.acceptance import Acceptance
from specjax.planner.chips import Chip
from specjax.planner.config import PlanConfig
from specjax.planner.cost import Cost
from specjax.planner.pair import Memory, Pair, find_pair, layout_of, trace_round

_MOST = 8
_TRACED = 4  # numbers of drafts
DRAFT, VERIFY, OTHER = ("propose", "observe"), ("forward",), ("verify", "commit", "")


@dataclasses.dataclass(frozen=True)
class Point:
    """A round that was traced.

    Attributes:
        drafts: per lane (K); 0 is the baseline.
        batch: lanes (B).
        context: room per lane.
        cost: of the round on one device.
        memory: on one device, its temporaries aside.
        seconds: of the round at least.
    """

    drafts: int
    batch: int
    context: int
    cost: Cost
    memory: Memory
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        config: what was asked.
        pair: target and head.
        chip: one device.
        most: largest number of drafts.
        points: the rounds that were traced.
        acceptance: how many drafts stand; None if nobody knows.
    """

    config: PlanConfig
    pair: Pair
    chip: Chip
    most: int
    points: tuple[Point, ...]
    acceptance: Acceptance | None

    @property
    def traced(self) -> tuple[int, ...]:
        """Numbers of drafts that were traced, the baseline's 0 among them."""
        return tuple(sorted({point.drafts for point in self.points}))

    def at(self, drafts: int, batch: int) -> list[Point]:
        """Return the points of a round, by ascending context."""
        found = [p for p in self.points if (p.drafts, p.batch) == (drafts, batch)]
        return sorted(found, key=lambda point: point.context)

    def profile(self, batch: int, context: int) -> Profile:
        """Return what rounds cost with so many lanes at a context."""
        rounds = {}
        for drafts in self.traced:
            points = self.at(drafts, batch)
            seconds = np.interp(context, [p.context for p in points], [p.seconds for p in points])
            rounds[drafts] = float(seconds)
        return Profile(batch, rounds)

    def break_even(self, drafts: int, batch: int, context: int) -> float:
        """Return the tokens per round from which on drafting pays."""
        profile = self.profile(batch, context)
        return profile.round_seconds(drafts) / profile.round_seconds(0)

    def speedup(self, drafts: int, batch: int, context: int) -> float:
        """Return the expected speedup; an acceptance must be known."""
        assert self.acceptance is not None
        return self.acceptance.tokens(drafts) / self.break_even(drafts, batch, context)

    def best(self, batch: int, context: int) -> tuple[int, float]:
        """Return (number of drafts, its speedup) of the best setting; (0, 1) is not to draft."""
        found = [(k, self.speedup(k, batch, context)) for k in range(1, self.most + 1)]
        return max([(0, 1.0), *found], key=lambda each: each[1])

    def needed(self, batch: int, context: int) -> float:
        """Return the bytes that a device needs, temporaries included, at the most drafts."""
        point = self.at(self.most, self._near(batch))
        contexts = [p.context for p in point]
        state = np.interp(context, contexts, [p.memory.state / p.batch for p in point]) * batch
        memory = point[0].memory
        return float(memory.target + memory.head + state) + self.temporaries(batch, context)

    def temporaries(self, batch: int, context: int) -> float:
        """Return an upper estimate of a round's temporaries on a device."""
        batches = [b for b in self.config.batches if self.at(self.most, b)]
        sizes = []
        for lanes in batches:
            points = self.at(self.most, lanes)
            alive = [p.cost.temporaries for p in points]
            sizes.append(float(np.interp(context, [p.context for p in points], alive)))
        if batch > batches[-1]:
            return sizes[-1] * batch / batches[-1]
        return float(np.interp(batch, batches, sizes))

    @property
    def room(self) -> float:
        """Bytes of a device that may be used."""
        return self.chip.memory * self.config.usable

    def most_lanes(self, context: int) -> int:
        """Return the most lanes whose round fits; 0 if not even the least does."""
        group = self.config.mesh.data * self.config.mesh.fsdp
        if self.needed(group, context) > self.room:
            return 0
        low, high = 1, 2
        while self.needed(high * group, context) <= self.room and high < 1 << 20:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.needed(middle * group, context) <= self.room
            low, high = (middle, high) if fits else (low, middle)
        return low * group

    def _near(self, batch: int) -> int:
        return min(self.config.batches, key=lambda lanes: abs(lanes - batch))


def make(config: PlanConfig, on_point: Callable[[int, int], None] = lambda i, n: None) -> Plan:
    """Plan what a configuration names.

    Args:
        config: what to plan.
        on_point: called with (rounds traced, of how many).

    Raises:
        SpecJaxError: one line, for anything wrong in what was given.
    """
    pair = find_pair(config.target, config.head, config.how)
    given = profiles.read(config.acceptance, pair.head.name)
    most = _most(config, pair)
    layout = layout_of(config.mesh)
    longest = pair.target.info.max_context
    if max(config.contexts) > longest:
        raise ConfigError(
            f"Plan.contexts: {pair.target_name} has at most {longest} tokens of context,"
            f" {max(config.contexts)} asked for"
        )
    chip = chips.find(
        config.chip,
        config.dtype,
        memory=config.memory_gb * 1e9,
        bandwidth=config.bandwidth_gb * 1e9,
        peak=config.peak_tflops * 1e12,
        link=config.link_gb * 1e9,
    )
    # As the engine has it: a bfloat16 write converts the whole cache on the CPU.
    cache_dtype = "float32" if chip.platform == "cpu" else config.dtype
    drafts = (0, *traced_drafts(most))
    wanted = [
        (k, batch, context)
        for context in sorted({config.contexts[0], config.contexts[-1]})
        for batch in config.batches
        for k in drafts
    ]
    points: list[Point] = []
    for k, batch, context in wanted:
        on_point(len(points), len(wanted))
        cost, memory = trace_round(
            pair,
            k,
            batch,
            context,
            dtype=config.dtype,
            cache_dtype=cache_dtype,
            platform=chip.platform,
            layout=layout,
        )
        points.append(Point(k, batch, context, cost, memory, chip.seconds(cost)))
    return Plan(config, pair, chip, most, tuple(points), given)


def traced_drafts(most: int) -> Sequence[int]:
    """Return the numbers of drafts whose rounds are traced: all of a few, or some of many."""
    return sorted({int(k) for k in np.linspace(1, most, min(most, _TRACED)).round()})


def _most(config: PlanConfig, pair: Pair) -> int:
    limit = pair.head.max_tokens
    if config.most and limit is not None and config.most > limit:
        raise ConfigError(
            f"Plan.most is {config.most}, but {pair.head_name} drafts at most {limit} tokens"
        )
    return config.most or min(limit or _MOST, _MOST)
