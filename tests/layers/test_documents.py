"""Which positions of packed rows belong together."""

import jax.numpy as jnp
import numpy as np

from specjax.layers.context import Context
from specjax.layers.documents import Documents
from specjax.layers.rope import RopeConfig, rope_tables

# Texts of 2, 3 and 1 positions; a row of pads.
INDEX = jnp.asarray([[0, 0, 1, 1, 1, 2, -1], [-1] * 7])
POSITIONS = jnp.asarray([[0, 1, 0, 1, 2, 0, 0], [0] * 7])
DOCUMENTS = Documents(INDEX, POSITIONS)


def test_texts_are_apart_and_pads_in_none():
    first = np.flatnonzero(DOCUMENTS.first[0])
    assert first.tolist() == [0, 2, 5] and not DOCUMENTS.first[1].any()
    want = np.zeros((7, 7), bool)
    for start, end in ((0, 2), (2, 5), (5, 6)):
        want[start:end, start:end] = True
    np.testing.assert_array_equal(DOCUMENTS.together[0], want)
    assert not DOCUMENTS.together[1].any()
    assert np.flatnonzero(DOCUMENTS.reached(1)[0]).tolist() == [1, 3, 4]
    assert np.flatnonzero(DOCUMENTS.reached(2)[0]).tolist() == [4]


def test_context_of_documents():
    """Rope restarts at each text; the mask is causal inside it."""
    rope, zero = RopeConfig(1e4, 8), jnp.zeros(2, jnp.int32)
    ctx = Context.of(zero, zero + 6, 7, [rope], documents=DOCUMENTS)
    for got, want in zip(ctx.rope(rope), rope_tables(rope, POSITIONS), strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(ctx.causal, DOCUMENTS.together & np.tri(7, dtype=bool))
