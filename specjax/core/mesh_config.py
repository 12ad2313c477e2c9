"""Which devices a program is spread over, and how; imports nothing heavy."""

import dataclasses

from specjax.core.errors import ConfigError, nearest

AXES = ("data", "fsdp", "tensor", "expert")
LOGICAL = ("batch", "embed", "vocab", "heads", "kv_heads", "mlp", "experts", "layers")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """A mesh of devices with four axes, any of which may be 1.

    Attributes:
        data: parts of the batch.
        fsdp: parts of the batch too, and of the weights that are trained.
        tensor: parts of heads, MLPs and vocabulary.
        expert: parts of the experts.
        rules: changes to the tables of `core.sharding`, each "logical=mesh+mesh" or "logical=" for
            none, as "mlp=tensor+expert".
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        for name in AXES:
            if getattr(self, name) < 1:
                raise ConfigError(f"Mesh.{name} must be at least 1, got {getattr(self, name)}")
        for rule in self.rules:
            logical, equals, axes = rule.partition("=")
            if not equals or logical not in LOGICAL:
                raise ConfigError(
                    f"Mesh.rules: {rule!r} does not begin with an axis of weights and '='"
                    f"{nearest(logical, LOGICAL)} (axes: {', '.join(LOGICAL)})"
                )
            for axis in filter(None, axes.split("+")):
                if axis not in AXES:
                    raise ConfigError(
                        f"Mesh.rules: {rule!r} names no mesh axis {axis!r}{nearest(axis, AXES)}"
                        f" (axes: {', '.join(AXES)})"
                    )

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return self.data * self.fsdp * self.tensor * self.expert

    @property
    def name(self) -> str:
        """What records call it: the axes that split anything, and the changed rules."""
        split = [f"{axis}={n}" for axis in AXES if (n := getattr(self, axis)) > 1]
        return " ".join((*split, *self.rules)) if split else "one device"

    @property
    def changes(self) -> dict[str, tuple[str, ...]]:
        """`rules` as a table."""
        parts = (rule.partition("=") for rule in self.rules)
        return {logical: tuple(filter(None, axes.split("+"))) for logical, _, axes in parts}
