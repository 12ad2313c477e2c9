"""Chips: what bounds a program, and the table."""

import jax
import jax.numpy as jnp
import pytest

from specjax.core.errors import ConfigError
from specjax.planner import chips
from specjax.planner.chips import CHIPS, Chip
from specjax.planner.cost import Cost, Site, Source
from specjax.planner.program import flatten
from specjax.planner.walk import walk

CHIP = Chip("test", "cuda", 1e9, 100.0, {"float32": 1000.0, "bfloat16": 2000.0}, 10.0, "", 0.1, 0.5)


def cost(**site) -> Cost:
    return Cost((Site("forward", "test", **site),), 0.0)


@pytest.mark.parametrize(
    ("site", "seconds", "bound"),
    [
        ({"flops": {"float32": 3000.0}, "written": 100.0, "steps": 1}, 3.0, "compute"),
        ({"flops": {"bfloat16": 3000.0}, "written": 100.0, "steps": 1}, 1.5, "compute"),
        ({"flops": {"float32": 10.0}, "reads": {Source(): 150.0}, "written": 50.0}, 2.0, "memory"),
        ({"steps": 7, "written": 1.0}, 0.7, "steps"),
        ({"sent": 20.0, "exchanges": 1}, 2.0, "links"),
        ({"sent": 1.0, "exchanges": 3}, 1.5, "links"),
        ({"flops": {"int8": 1000.0}}, 1.0, "compute"),
    ],
)
def test_an_operation_takes_as_long_as_what_bounds_it(site, seconds: float, bound: str) -> None:
    assert CHIP.seconds(cost(**site)) == pytest.approx(seconds)
    assert CHIP.bound(cost(**site)) == bound


def test_operations_take_their_time_one_after_another() -> None:
    both = Cost((*cost(steps=1).sites, *cost(flops={"float32": 1000.0}).sites), 0.0)
    assert CHIP.seconds(both) == pytest.approx(1.1)
    assert CHIP.bound(both) == "compute"
    assert CHIP.seconds(Cost((), 0.0)) == 0.0


def test_decoding_reads_and_prefill_computes() -> None:
    """The ridge: a product with few rows is bound by its weight, one with many by its sums."""
    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    for rows, bound in ((1, "memory"), (4096, "compute")):
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
        made = walk(flatten(jax.make_jaxpr(jnp.dot)(x, weight), "rocm"))
        assert CHIPS["mi300x"].bound(made) == bound


def test_figures_may_be_given() -> None:
    found = chips.find("MI355X", bandwidth=1e12, peak=5e15)
    assert found.bandwidth == 1e12
    assert found.peak("bfloat16") == 5e15
    assert found.peak("float32") == CHIPS["mi355x"].peak("float32")
    assert found.memory == CHIPS["mi355x"].memory
    assert "given: bandwidth, peaks" in found.source


def test_no_such_chip() -> None:
    with pytest.raises(ConfigError, match="mi300x"):
        chips.find("mi300")


def test_a_cpu_whose_figures_are_given_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(chips, "measure_cpu")
    found = chips.find("cpu", bandwidth=2e10, peak=1e12)
    assert (found.bandwidth, found.platform) == (2e10, "cpu")


def test_the_cpu_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "_SIZE", 64)
    found = chips.measure_cpu("bfloat16")
    assert found.bandwidth > 0
    assert set(found.peaks) == {"float32", "bfloat16"}
    assert min(found.peaks.values()) > 0
