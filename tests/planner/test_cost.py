"""Sites in loops: what is multiplied, and what is capped."""

import pytest

from specjax.planner.cost import Cost, Site, Source


def test_a_loop_multiplies() -> None:
    site = Site("forward", "test", {"float32": 3.0}, {Source(): 5.0}, 7.0, 11.0, 1.0, 2.0)
    found = site.looped(4, waiting=True)
    assert (found.flops, found.bytes, found.sent) == ({"float32": 12.0}, 48.0, 44.0)
    assert (found.steps, found.exchanges) == (4.0, 8.0)
    parallel = site.looped(4, waiting=False)
    assert (parallel.bytes, parallel.steps, parallel.exchanges) == (48.0, 1.0, 2.0)
    assert site.looped(0, waiting=False).steps == 0.0


@pytest.mark.parametrize(("levels", "read"), [(0, 5 * 4 * 3.0), (1, 5 * 10.0), (2, 10.0)])
def test_a_table_is_read_at_most_once_in_the_loops_it_is_picked_in(
    levels: int, read: float
) -> None:
    site = Site("forward", "test", reads={Source(10.0, levels): 3.0})
    assert site.looped(4, True).looped(5, True).bytes == read


def test_stages_are_told_apart() -> None:
    sites = (Site("forward", "a", written=3.0), Site("propose", "b", written=5.0))
    cost = Cost(sites, 9.0)
    assert cost.bytes == 8.0
    assert cost.stage("propose").bytes == 5.0
    assert cost.stage("propose", "observe").temporaries == 9.0
