"""A run of one process; runs of several are in tests/test_several_hosts.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import hosts


def test_one_process_leads_and_waits_for_nobody() -> None:
    assert hosts.is_lead() and not hosts.are_several()
    assert hosts.largest(15) == 15 and hosts.of_lead("größer") == "größer"
    hosts.wait("nothing")


def test_values_go_and_come_back() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tree = {"a": np.arange(6.0).reshape(2, 3), "b": None, "c": (jnp.ones(4, jnp.int32),)}
    placed = hosts.put(tree, where)
    assert placed["a"].sharding == where and placed["b"] is None
    back = hosts.fetch(placed)
    assert isinstance(back["a"], np.ndarray) and back["c"][0].dtype == np.int32
    np.testing.assert_array_equal(back["a"], tree["a"])
