"""Training and drafting are one model: what the unroll computes at a row is what a round drafts."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.heads.eagle3 import loss as ttt
from specjax.heads.eagle3.network import draft_logits
from tests.heads.eagle3 import cases

KEPT = np.sort(np.random.default_rng(1).permutation(cases.VOCAB)[:12])
ROWS, WIDTH, STEPS = 3, 12, 4


@pytest.mark.parametrize("anchor", [1, 5])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "draft-vocab"])
def test_f24_each_row_of_the_unroll_is_a_drafting_round(
    kept: np.ndarray | None, anchor: int
) -> None:
    """The dense unroll, read at one anchor row, equals the head drafting from that anchor."""
    head, params, borrowed = cases.tiny(kept, ttt_length=STEPS)
    batch = cases.tiny_batch([WIDTH] * ROWS, WIDTH)
    count = [anchor] * ROWS
    following = jnp.roll(batch.tokens, -1, axis=1)
    state = cases.jit(head.observe)(
        params,
        borrowed,
        head.init_state(ROWS, WIDTH + STEPS),
        cases.observation(following, batch.taps, count, [0] * ROWS),
    )
    proposal, _, drafted = cases.jit(partial(head.draft, num=STEPS))(
        params, borrowed, state, cases.context(state)
    )
    # The text goes on with the drafts: pair anchor - 1 holds the token at `anchor`.
    text = np.array(batch.tokens)
    text[:, anchor + 1 : anchor + 1 + STEPS] = proposal.tokens
    rows = ttt.rows_of(batch.replace(tokens=jnp.asarray(text)))
    outs = cases.jit(partial(ttt.unroll, head))(params, borrowed, rows)
    for k in range(STEPS):
        logits = draft_logits(head, params, borrowed, outs[k][:, anchor - 1])
        np.testing.assert_allclose(logits, drafted[k], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", [0, 1])
def test_f8_the_first_tokens_of_a_prompt_count(position: int) -> None:
    """Two prompt tokens: the drafts depend on the token after each of their states."""
    head, params, borrowed = cases.tiny()
    batch = cases.tiny_batch([2, 2], 2)
    # Two rows alike but for one token; the state of position 0 goes with the token at 1.
    tokens = np.array([[7, 9], [7, 9]])
    tokens[1, position] = 11
    taps = jnp.broadcast_to(batch.taps[:, :1], batch.taps.shape)
    state = cases.jit(head.observe)(
        params,
        borrowed,
        head.init_state(2, 8),
        cases.observation(jnp.asarray(tokens), taps, [2, 2], [0, 0]),
    )
    _, _, logits = cases.jit(partial(head.draft, num=1))(
        params, borrowed, state, cases.context(state)
    )
    assert np.abs(logits[0][0] - logits[0][1]).max() > 1e-3
