"""Layers as runs that repeat."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.params import ParamSpec, stack
from specjax.core.stack import Segment, Stacked, group, map_entries, segments, ungroup


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("SSSSSF" * 5, [Segment(0, 6, 5)]),
        ("LLLF" * 3, [Segment(0, 4, 3)]),
        ("D" + "M" * 7, [Segment(0, 1, 1), Segment(1, 1, 7)]),
        ("DDDMMMM", [Segment(0, 1, 3), Segment(3, 1, 4)]),
        # Gemma 4 E2B: layers from 15 on read the keys and values of others.
        ("SSSSF" * 3 + "ssssf" * 4, [Segment(0, 5, 3), Segment(15, 5, 4)]),
        ("ABC", [Segment(0, 3, 1)]),
        ("ABCABCX", [Segment(0, 3, 2), Segment(6, 1, 1)]),
        ("XABAB", [Segment(0, 1, 1), Segment(1, 2, 2)]),
    ],
)
def test_segments_find_the_pattern(kinds, expected):
    assert segments(kinds, "scan") == tuple(expected)
    covered = [i for part in expected for i in part.layers]
    assert covered == list(range(len(kinds)))
    assert segments(kinds, "unroll") == (Segment(0, len(kinds), 1),)


def test_an_unknown_loop_is_refused():
    with pytest.raises(ValueError, match="layer_loop 'fast'; have unroll, scan"):
        segments("AB", "fast")


def test_grouped_and_ungrouped_are_inverse():
    kinds = "DLLFLLFX"
    layers = [{"w": jnp.full((2,), i), "none": None} for i in range(len(kinds))]
    parts = segments(kinds, "scan")
    grouped = group(layers, parts)
    assert [isinstance(g, Stacked) for g in grouped] == [False, True, True, True, False]
    np.testing.assert_array_equal(grouped[3].tree["w"][:, 0], [3, 6])
    for layer, back in zip(layers, ungroup(grouped, parts), strict=True):
        np.testing.assert_array_equal(layer["w"], back["w"])
        assert back["none"] is None


def test_layers_without_an_entry_stay_none():
    assert group([None] * 4, segments("ABAB", "scan")) == (None, None)


def test_a_function_of_one_layer_is_applied_to_each_turn():
    entry = Stacked(jnp.arange(6).reshape(3, 2))
    out = map_entries(lambda e, u: e + u, entry, Stacked(jnp.ones((3, 2), int)))
    np.testing.assert_array_equal(out.tree, jnp.arange(6).reshape(3, 2) + 1)
    assert map_entries(lambda e, u: e + u, 1, 2) == 3


def test_specs_are_stacked_with_their_names():
    specs = [ParamSpec((2, 3), ("mlp", "embed"), f"l.{i}.w") for i in range(3)]
    table = [{"w": stack([spec, spec], "experts")} for spec in specs]
    stacked = group(table, (Segment(0, 1, 3),))[0].tree["w"]
    assert stacked.shape == (3, 2, 2, 3)
    assert stacked.axes == ("layers", "experts", "mlp", "embed")
    assert [t.hf for t in stacked.published()] == [f"l.{i}.w" for i in range(3) for _ in range(2)]


def test_unlike_specs_are_not_stacked():
    one, other = ParamSpec((2,), (None,), "a"), ParamSpec((3,), (None,), "b")
    with pytest.raises(ValueError, match="a and what should be stacked with it are not alike"):
        stack([one, other], "experts")
