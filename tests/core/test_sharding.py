import jax
import pytest
from jax.sharding import PartitionSpec as P

from specjax.core import sharding
from specjax.core.errors import ConfigError
from specjax.core.mesh_config import MeshConfig
from specjax.core.params import ParamSpec


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": 0}, r"Mesh\.data must be at least 1, got 0"),
        ({"rules": ("mlp",)}, "'mlp' does not begin with an axis of weights"),
        ({"rules": ("mpl=tensor",)}, "did you mean 'mlp'"),
        ({"rules": ("mlp=tensr",)}, "no mesh axis 'tensr'.*did you mean 'tensor'"),
    ],
)
def test_configurations_refused(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeshConfig(**given)


def test_changes() -> None:
    config = MeshConfig(tensor=2, expert=4, rules=("mlp=tensor+expert", "vocab="))
    assert config.devices == 8
    mesh = sharding.make_mesh(MeshConfig())
    table = dict(sharding.Layout.of(config, sharding.SERVED, mesh).rules)
    assert (table["mlp"], table["vocab"]) == (("tensor", "expert"), ())
    assert table["heads"] == ("tensor",)


def test_too_few_devices() -> None:
    with pytest.raises(ConfigError, match=r"= 1 x 1 x 64 x 1 needs 64 devices, there are"):
        sharding.make_mesh(MeshConfig(tensor=64))


@pytest.mark.devices8
def test_partitions_by_name() -> None:
    config = MeshConfig(fsdp=2, tensor=2, expert=2)
    mesh = sharding.make_mesh(config)
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    experts = ParamSpec((4, 6, 8), ("experts", "mlp", "embed"), "w")
    norm = ParamSpec((8,), (None,), "n")
    layout = sharding.Layout.of(config, sharding.SERVED, mesh)
    assert layout.weight(experts).spec == P("expert", "tensor")
    trained = sharding.Layout.of(config, sharding.TRAINED, mesh)
    assert trained.weight(experts).spec == P("expert", "tensor", "fsdp")
    tree = layout.weights({"a": experts, "b": norm})
    assert tree["b"].spec == P()
    array = jax.device_put(jax.numpy.zeros((4, 6, 8)), tree["a"])
    assert array.addressable_shards[0].data.shape == (2, 3, 8)


@pytest.mark.devices8
@pytest.mark.parametrize(
    ("spec", "rules", "message"),
    [
        (ParamSpec((6, 8), ("kv_heads", "embed"), "k"), (), "k: kv_heads of 6 does not divide"),
        (ParamSpec((8, 8), ("mlp", "embed"), "m"), ("embed=tensor",), "mlp and embed both lie on"),
        (ParamSpec((8,), ("other",), "o"), (), "o: no rule for the axis 'other'"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    spec: ParamSpec, rules: tuple[str, ...], message: str
) -> None:
    config = MeshConfig(tensor=4, rules=rules)
    layout = sharding.Layout.of(config, sharding.SERVED)
    with pytest.raises(ConfigError, match=message):
        layout.weight(spec)


@pytest.mark.devices8
def test_a_batch_that_does_not_divide() -> None:
    layout = sharding.Layout.of(MeshConfig(data=2, fsdp=2), sharding.SERVED)
    layout.check_rows(8, "Trainer.batch_size")
    with pytest.raises(ConfigError, match=r"Trainer\.batch_size 6 does not divide over data x fs"):
        layout.check_rows(6, "Trainer.batch_size")
