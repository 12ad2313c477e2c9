"""Greedy verification against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.verify import greedy

B, K, V = 4, 3, 5
run = jax.jit(greedy)


def by_loop(choices, drafts, width):
    """The next tokens of one row, one at a time."""
    tokens = []
    for k in range(min(width, len(drafts))):
        if choices[k] != drafts[k]:
            break
        tokens.append(drafts[k])
    return len(tokens), [*tokens, choices[len(tokens)]]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_greedy_is_the_loop(data):
    """Small integer logits make ties: the lowest id wins; widths from 0 beyond K."""
    logits = np.array(data.draw(st.lists(st.integers(0, 2), min_size=80, max_size=80)), np.float32)
    logits = logits.reshape(B, K + 1, V)
    choices = logits.argmax(-1)
    swap = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).reshape(B, K)
    drafts = np.where(swap, (choices[:, :K] + 1) % V, choices[:, :K])
    width = data.draw(st.lists(st.integers(0, K + 1), min_size=B, max_size=B))
    got = run(jnp.asarray(logits, jnp.bfloat16), jnp.asarray(drafts), jnp.asarray(width))
    for b in range(B):
        accepted, tokens = by_loop(choices[b], drafts[b], width[b])
        assert int(got.accepted[b]) == accepted
        assert got.tokens[b].tolist() == tokens + [0] * (K + 1 - len(tokens))
        assert int(got.admitted[b]) == min(width[b], K)


def test_without_drafts():
    """F59: K = 0 gives the argmax."""
    logits = jnp.asarray([[[0.0, 2.0, 1.0]], [[3.0, 3.0, 1.0]]])
    got = greedy(logits, jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32))
    assert got.tokens.tolist() == [[1], [0]] and not got.accepted.any()
