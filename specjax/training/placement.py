"""Where the arrays of a run live: rows of a batch, the frozen target, masters and moments."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax
from jax.sharding import NamedSharding

from specjax.core import hosts
from specjax.core.mesh_config import MeshConfig
from specjax.core.params import leaves_with_names
from specjax.core.sharding import SERVED, TRAINED, Layout, make_mesh
from specjax.training.partition import Partition
from specjax.training.step import TrainState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Placement:
    """The layouts of a run on one mesh.

    Attributes:
        served: of weights that are only read.
        trained: of weights that are trained, and of batches.
    """

    served: Layout
    trained: Layout

    @classmethod
    def of(cls, config: MeshConfig, batch_size: int, name: str = "Trainer.batch_size") -> Placement:
        """Make the mesh of a run whose batches have `batch_size` rows, as the setting `name` says.

        Raises:
            ConfigError: too few devices, or a batch that cannot be split.
        """
        mesh = make_mesh(config)
        found = cls(*(Layout.of(config, strategy, mesh) for strategy in (SERVED, TRAINED)))
        found.trained.check_rows(batch_size, name)
        return found

    def target(self, specs: PyTree) -> PyTree:
        """Return the shardings of a target's weights, as `targets.load` takes them.

        Raises:
            ConfigError: see `Layout.spec`.
        """
        return self.served.weights(specs)

    def batch(self, batch: PyTree) -> PyTree:
        """Put the rows of a host batch where they belong; it needs those of `share` only."""
        return hosts.put(batch, self.trained.rows)

    def share(self, batch_size: int) -> frozenset[int]:
        """Return the rows of a batch that lie on devices of this process."""
        parts = self.trained.rows.addressable_devices_indices_map((batch_size,)).values()
        return frozenset(row for at in parts if at for row in range(*at[0].indices(batch_size)))

    def leaves(self, head: Any, partition: Partition) -> tuple[PyTree, PyTree]:
        """Return the shardings of a head's (trained, frozen) leaves.

        A head that does not describe its weights is held whole everywhere.
        """
        specs = dict(leaves_with_names(head.specs())) if hasattr(head, "specs") else {}
        parts: tuple[dict[str, NamedSharding], dict[str, NamedSharding]] = ({}, {})
        for name, is_trained in zip(partition.names, partition.trained, strict=True):
            layout = self.trained if is_trained else self.served
            spec = specs.get(name)
            parts[not is_trained][name] = layout.whole if spec is None else layout.weight(spec)
        return parts

    def state(
        self, state: TrainState, rule: optax.GradientTransformation, leaves: PyTree
    ) -> tuple[TrainState, TrainState]:
        """Return (the state in its place, its shardings): moments lie as their weights do.

        Args:
            state: before the first step.
            rule: the optimiser.
            leaves: shardings of the trained leaves.
        """
        whole = self.trained.whole
        where = TrainState(
            step=whole,
            trained=leaves,
            optimizer=optax.tree_utils.tree_map_params(
                rule,
                lambda _, place: place,
                state.optimizer,
                leaves,
                transform_non_params=lambda _: whole,
            ),
            skipped=whole,
            average=None if state.average is None else leaves,
        )
        return hosts.put(state, where), where
