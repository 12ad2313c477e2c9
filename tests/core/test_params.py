"""One tree of specs, and the loops over it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax.core.params import ParamSpec, count, init_params, leaves_with_names, shapes


@struct.dataclass
class Weights:
    matrix: object
    layers: tuple
    absent: object = None


def specs():
    return Weights(
        matrix=ParamSpec((3, 4), ("mlp", "embed"), "a.weight"),
        layers=(
            {"norm": ParamSpec((4,), ("embed",), "n.weight", init="ones")},
            {"bias": ParamSpec((5,), (None,), "b.bias", init="zeros", dtype="int32")},
            {"again": ParamSpec((3, 4), ("mlp", "embed"), "c.weight")},
        ),
    )


def test_names_counts_and_shapes_come_from_the_same_tree():
    assert [(path, spec.hf) for path, spec in leaves_with_names(specs())] == [
        ("matrix", "a.weight"),
        ("layers[0]['norm']", "n.weight"),
        ("layers[1]['bias']", "b.bias"),
        ("layers[2]['again']", "c.weight"),
    ]
    assert count(specs()) == 12 + 4 + 5 + 12
    tree = shapes(specs(), "bfloat16")
    assert tree.absent is None
    assert tree.matrix == jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)
    assert tree.layers[1]["bias"].dtype == jnp.int32  # a dtype that a spec fixes stays


def test_init_follows_the_specs():
    params = init_params(specs(), jax.random.key(0), "bfloat16", scale=0.5)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes(specs(), "bfloat16")
    )
    assert np.all(params.layers[0]["norm"] == 1) and np.all(params.layers[1]["bias"] == 0)


def test_init_is_a_function_of_the_key_and_no_two_leaves_are_alike():
    one, same, other = (init_params(specs(), jax.random.key(k)) for k in (0, 0, 1))
    assert np.array_equal(one.matrix, same.matrix)
    assert not np.array_equal(one.matrix, other.matrix)
    assert not np.array_equal(one.matrix, one.layers[2]["again"])


def test_init_scale():
    spec = ParamSpec((200, 200), (None, None), "w")
    assert float(init_params(spec, jax.random.key(0), scale=0.3).std()) == pytest.approx(0.3, 0.02)


def test_axes_must_match_the_shape():
    with pytest.raises(ValueError, match=r"w\.weight: 1 axis names for shape \(3, 4\)"):
        ParamSpec((3, 4), ("embed",), "w.weight")
