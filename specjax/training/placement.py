"""Where the arrays of a run live: rows of a batch, the frozen target, masters and moments."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from specjax.core import sharding
from specjax.core.mesh_config import MeshConfig
from specjax.core.params import leaves_with_names
from specjax.training.partition import Partition
from specjax.training.step import TrainState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and the tables that say what is split over it.

    Attributes:
        mesh: the devices.
        served: table of weights that are only read.
        trained: table of weights that are trained.
    """

    mesh: Mesh
    served: sharding.Rules
    trained: sharding.Rules

    @classmethod
    def of(cls, config: MeshConfig, batch_size: int, name: str = "Trainer.batch_size") -> Placement:
        """Make the mesh of a run.

        Args:
            config: its axes.
            batch_size: rows of a batch.
            name: of the setting that says so.

        Raises:
            ConfigError: too few devices, or a batch that cannot be split.
        """
        mesh = sharding.make_mesh(config)
        served, trained = (
            sharding.table(strategy, config) for strategy in (sharding.SERVED, sharding.TRAINED)
        )
        sharding.check_batch(batch_size, mesh, trained, name)
        return cls(mesh, served, trained)

    def target(self, specs: PyTree) -> PyTree:
        """Return the shardings of a target's weights, as `targets.load` takes them.

        Raises:
            ConfigError: see `core.sharding.partition`.
        """
        return sharding.shardings(specs, self.mesh, self.served)

    def batch(self, batch: PyTree) -> PyTree:
        """Put the rows of a host batch where they belong."""
        return jax.device_put(batch, sharding.of_batch(self.mesh, self.trained))

    def leaves(self, head: Any, partition: Partition) -> tuple[PyTree, PyTree]:
        """Return the shardings of a head's (trained, frozen) leaves.

        A head that does not describe its weights is held whole everywhere.
        """
        whole = sharding.replicated(self.mesh)
        specs = dict(leaves_with_names(head.specs())) if hasattr(head, "specs") else {}
        parts: tuple[dict[str, NamedSharding], dict[str, NamedSharding]] = ({}, {})
        for name, is_trained in zip(partition.names, partition.trained, strict=True):
            spec = specs.get(name)
            rules = self.trained if is_trained else self.served
            parts[not is_trained][name] = (
                whole
                if spec is None
                else NamedSharding(self.mesh, sharding.partition(spec, self.mesh, rules))
            )
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
        whole = sharding.replicated(self.mesh)
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
        return jax.device_put(state, where), where
