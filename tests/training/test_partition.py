import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import TrainingError
from specjax.training.partition import Partition, cast_floats, digest
from tests.training.toy import ToyHead


def test_split_and_join() -> None:
    head = ToyHead()
    params = head.init()
    params["w"] = params["w"].astype(jnp.bfloat16)
    partition = Partition.of(params, head.trainable())
    trained, frozen = partition.split(params)
    assert list(trained) == ["['w']"] and trained["['w']"].dtype == jnp.float32
    assert sorted(frozen) == ["['bias']", "['map']"]
    joined = partition.join(trained, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(params)
    np.testing.assert_array_equal(joined["w"], params["w"].astype(jnp.float32))
    np.testing.assert_array_equal(joined["map"], params["map"])


def test_integers_are_frozen_unasked() -> None:
    trained, frozen = (p := Partition.of(ToyHead().init())).split(ToyHead().init())
    assert len(p.names) == 3 and list(frozen) == ["['map']"] and len(trained) == 2


def test_refuses_nothing_to_train() -> None:
    with pytest.raises(TrainingError, match="nothing to train"):
        Partition.of({"a": jnp.zeros(3)}, {"a": False})


def test_cast_leaves_integers() -> None:
    out = cast_floats({"a": jnp.zeros(2), "b": jnp.zeros(2, jnp.int32)}, "bfloat16")
    assert out["a"].dtype == jnp.bfloat16 and out["b"].dtype == jnp.int32


def test_digest_sees_shape_dtype_and_values() -> None:
    arrays = [np.zeros(4), np.zeros((2, 2)), np.zeros(4, np.int64), np.ones(4)]
    assert len({digest(array) for array in arrays}) == 4
