"""What chips can do, by their makers' data sheets; what this CPU can do, by timing it.

A round is bounded by what a chip computes, what it reads, and how fast devices exchange results.
Data sheets give peaks; no program reaches them all, and a plan's seconds are a lower bound. Two
figures are in no data sheet and are assumptions of ours, the same for all accelerators: a kernel
takes at least 3 microseconds, an exchange between devices at least 10.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.core.errors import ConfigError, nearest
from specjax.planner.cost import Cost, Site

_GB, _TB, _TFLOPS = 1e9, 1e12, 1e12
_ROWS = 256  # of products that count
_SIZE = 4096  # of the weights that a CPU is timed with: larger than its caches


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        name: as `Plan.chip` calls it.
        platform: whose branches of a program it takes: "cpu", "cuda", "rocm".
        memory: bytes.
        bandwidth: bytes per second between memory and compute units.
        peaks: FLOPs per second of dense products, by dtype.
        link: bytes per second that it sends to the others of its node, all links together.
        source: where the figures are from.
        step: seconds that the shortest operation takes.
        exchange: seconds that the shortest exchange between devices takes.
    """

    name: str
    platform: str
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]
    link: float
    source: str
    step: float = 3e-6
    exchange: float = 10e-6

    def seconds(self, cost: Cost) -> float:
        """Return the least seconds that a program takes, its operations one after another."""
        return sum(self._parts(site)[0] for site in cost.sites)

    def bound(self, cost: Cost) -> str:
        """Return what most of the seconds go to: "memory", "compute", "links" or "steps"."""
        found: dict[str, float] = {}
        for site in cost.sites:
            seconds, what = self._parts(site)
            found[what] = found.get(what, 0.0) + seconds
        return max(found, key=lambda what: found[what]) if found else "-"

    def _parts(self, site: Site) -> tuple[float, str]:
        compute = sum(flops / self.peak(dtype) for dtype, flops in site.flops.items())
        memory, steps = site.bytes / self.bandwidth, site.steps * self.step
        links = max(site.sent / self.link if self.link else 0.0, site.exchanges * self.exchange)
        return max((compute, "compute"), (memory, "memory"), (steps, "steps"), (links, "links"))

    def peak(self, dtype: str) -> float:
        """FLOPs per second in a dtype; integers and what is not in the table go as float32."""
        return self.peaks.get(dtype, self.peaks["float32"])


def _accelerator(
    name: str, memory: int, bandwidth: float, bf16: float, f32: float, link: float
) -> Chip:
    """GB, TB/s, dense TFLOP/s in bfloat16 and float32, GB/s to the rest of the node."""
    platform = "rocm" if name.startswith("mi") else "cuda"
    return Chip(
        name,
        platform,
        memory * _GB,
        bandwidth * _TB,
        {"bfloat16": bf16 * _TFLOPS, "float32": f32 * _TFLOPS},
        link * _GB,
        _SHEETS[platform].format(name.upper()),
    )


_SHEETS = {
    "rocm": "AMD Instinct {} data sheet: HBM, peak dense bfloat16 and float32 matrix, 7 Infinity"
    " Fabric links in one direction",
    "cuda": "NVIDIA {} SXM data sheet: HBM, peak dense bfloat16 (half of the figure with sparsity),"
    " float32 without tensor cores, NVLink in one direction",
}
CHIPS = {
    chip.name: chip
    for chip in (
        _accelerator("mi300x", 192, 5.3, 1307.4, 163.4, 448),
        _accelerator("mi325x", 256, 6.0, 1307.4, 163.4, 448),
        _accelerator("mi355x", 288, 8.0, 2516.6, 157.3, 537.6),
        _accelerator("h100", 80, 3.35, 989.4, 66.9, 450),
        _accelerator("h200", 141, 4.8, 989.4, 66.9, 450),
        _accelerator("b200", 180, 7.7, 2250, 75, 900),
    )
}
NAMES = (*CHIPS, "cpu")


def find(name: str, dtype: str = "bfloat16", **given: float) -> Chip:
    """Return a chip of the table, or this CPU, timed where nothing is given.

    Args:
        name: one of NAMES, in any case.
        dtype: which peak `peak` is of.
        **given: figures other than the table's: memory, bandwidth, peak, link; 0 leaves one.

    Raises:
        ConfigError: no such chip.
    """
    word = name.lower()
    if word == "cpu":
        measured = given.get("bandwidth", 0) and given.get("peak", 0)
        chip = _CPU if measured else measure_cpu(dtype)
    elif word in CHIPS:
        chip = CHIPS[word]
    else:
        raise ConfigError(
            f"Plan.chip: no chip {name!r} in the table{nearest(word, NAMES)}"
            f" (it has {', '.join(NAMES)})"
        )
    changes: dict[str, Any] = {
        key: given[key] for key in ("memory", "bandwidth", "link") if given.get(key)
    }
    if given.get("peak"):
        changes["peaks"] = {**chip.peaks, dtype: given["peak"]}
    if changes:
        changes["source"] = f"{chip.source}; given: {', '.join(sorted(changes))}"
    return dataclasses.replace(chip, **changes)


# What its timing replaces; memory is looked up, a step is a guess.
_CPU = Chip("cpu", "cpu", 16 * _GB, 10 * _GB, {"float32": 1e11}, 10 * _GB, "not timed", 5e-6, 5e-5)


def measure_cpu(dtype: str) -> Chip:
    """Time this CPU: products of two rows read weights larger than its caches, of many rows count.

    Args:
        dtype: of the weights that are read. The bandwidth is that of the products that decoding is
            made of, not that of copying memory: bfloat16 kernels keep up with less.
    """
    import jax
    import jax.numpy as jnp

    from specjax.evaluation.machine import describe
    from specjax.layers.linear import linear_f32

    size, many = _SIZE, 8
    product = jax.jit(linear_f32)
    keys = jax.random.split(jax.random.key(0), many)
    peaks, bandwidth = {}, 0.0
    for kind in ("float32", "bfloat16"):
        weights = [jax.random.normal(key, (size, size), kind) for key in keys]
        row, rows = jnp.ones((2, size), kind), jnp.ones((_ROWS, size), kind)
        peaks[kind] = 2.0 * _ROWS * size * size / _fastest(product, rows, weights[:1])
        if kind == dtype:
            bandwidth = many * weights[0].nbytes / _fastest(product, row, weights)
    memory = describe().get("memory_bytes") or _CPU.memory
    return dataclasses.replace(
        _CPU,
        memory=float(memory),
        bandwidth=bandwidth,
        peaks=peaks,
        source=f"timed here: 2 ({dtype}) and {_ROWS} rows by weights of {size} x {size}",
    )


def _fastest(product: Callable[..., Any], rows: Any, weights: Sequence[Any]) -> float:
    """Seconds of the fastest of some runs: what else the machine does only slows them down."""
    import jax

    seconds = []
    for _ in range(10):  # the first compiles
        start = time.perf_counter()
        jax.block_until_ready([product(rows, weight) for weight in weights])
        seconds.append(time.perf_counter() - start)
    return min(seconds)
