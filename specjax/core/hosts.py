"""Several processes that run one program, each on the devices of its host (`jax.distributed`).

All of them take the same steps. What only one may do, as writing a report, is done by process 0,
the lead. In a run of one process these functions cost nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

PyTree = Any


def are_several() -> bool:
    """Whether this run has more processes than this one."""
    return jax.process_count() > 1


def is_lead() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


def put(tree: PyTree, shardings: PyTree) -> PyTree:
    """Put values where they belong; each process places the part that its devices hold.

    Args:
        tree: arrays of the host or of jax, equal in all processes but for parts that lie elsewhere.
        shardings: a sharding for all of them, or a tree of shardings.
    """
    if not are_several():
        return jax.device_put(tree, shardings)

    def place(leaf: Any, where: jax.sharding.Sharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, where)  # from the places it has on all hosts
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    return jax.tree.map(place, tree, jax.tree.broadcast(shardings, tree))


def fetch(tree: PyTree) -> PyTree:
    """Return whole numpy arrays, in every process; all processes must call it."""
    if not are_several():
        return jax.device_get(tree)

    def read(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return multihost_utils.process_allgather(leaf, tiled=True)
        return jax.device_get(leaf)

    return jax.tree.map(read, tree)


def largest(number: int) -> int:
    """Return the largest of the numbers that the processes give; all must call it."""
    if not are_several():
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def of_lead(text: str) -> str:
    """Return the text that process 0 gives; all must call it."""
    if not are_several():
        return text
    given = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(given))))
    padded = np.zeros(size, np.uint8)
    padded[: len(given)] = given[:size]
    # Added up over the processes, which needs more than a byte.
    return bytes(multihost_utils.broadcast_one_to_all(padded.astype(np.int32)).tolist()).decode()


def wait(what: str) -> None:
    """Wait until every process has come here.

    Args:
        what: they wait for; equal in all of them.
    """
    if are_several():
        multihost_utils.sync_global_devices(what)
