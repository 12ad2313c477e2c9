"""Whether sampled texts follow a target's law, whatever drafted them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chisquare

from specjax.decode import Engine, EngineConfig
from specjax.decode import engine as engine_module
from specjax.layers.sampling import Sampling

SYMBOLS, BEHIND, SAID, DRAFTS = 8, 9, 8, 3  # vocabulary, prompt, answer, drafts per round
TEMPERATURE = 2.0


def sampled_texts(
    target: Any,
    params: Any,
    prompt: np.ndarray,
    rows: int,
    head: Any,
    head_params: Any,
    config: EngineConfig,
) -> tuple[np.ndarray, float]:
    """Sample one prompt under `rows` seeds: (texts `[rows, BEHIND + SAID]`, share accepted)."""
    engine = Engine(target, params, head, head_params, config, stop_ids=())
    engine.price(BEHIND + SAID)
    state = engine_module._init_state(engine.decoder, rows, BEHIND + SAID, "float32")
    state = state.replace(
        tokens=state.tokens.at[:, :BEHIND].set(prompt),
        budget=jnp.full(rows, SAID, jnp.int32),
        sampling=Sampling.of(rows, TEMPERATURE, seed=np.arange(rows)),
    )
    pieces = (jnp.tile(jnp.asarray(prompt), (rows, 1)), jnp.full(rows, BEHIND), jnp.full(rows, -1))
    state = engine_module._prefill_chunk(engine.decoder, engine.weights, state, *pieces)
    while not bool(state.done.all()):
        state, _ = engine_module._run_rounds(engine.decoder, engine.weights, state, jnp.int32(100))
    return np.asarray(state.tokens), float(state.accepted.sum() / state.drafted.sum())


@functools.partial(jax.jit, static_argnums=0)
def plain_laws(target: Any, params: Any, texts: jax.Array) -> jax.Array:
    """Law of each token of the answers `[rows, SAID, SYMBOLS]`: one pass, nothing cached."""
    hidden = target.forward(params, texts).hidden[:, BEHIND - 1 : -1]
    return jax.nn.softmax(target.logits(params, hidden) / TEMPERATURE)


def check_law(target: Any, params: Any, texts: np.ndarray) -> None:
    """Pairs by chi-square; later tokens, drafted on top of rejections, by sums and surprise.

    Given what was said before, each token's law is known, so sums of (what came - its mean) over
    rows are centred with known variance.
    """
    rows = len(texts)
    firsts = texts.copy()  # every first token, each in a row of its own
    firsts[:SYMBOLS, BEHIND] = np.arange(SYMBOLS)
    law = np.asarray(plain_laws(target, params, firsts), np.float64)
    pairs = (law[0, 0][:, None] * law[:SYMBOLS, 1]).ravel()
    came = np.bincount(texts[:, BEHIND] * SYMBOLS + texts[:, BEHIND + 1], minlength=pairs.size)
    rare = pairs * rows < 5  # counted together
    cells = np.unique(np.where(rare, -1, np.arange(pairs.size)), return_inverse=True)[1]
    came, wanted = (np.bincount(cells, x) for x in (came, pairs / pairs.sum() * rows))
    assert came.size > 10
    assert chisquare(came, wanted).pvalue > 1e-4

    law = np.asarray(plain_laws(target, params, texts), np.float64)
    law /= law.sum(-1, keepdims=True)
    was = np.eye(SYMBOLS)[texts[:, BEHIND:]]
    spread = np.sqrt((law * (1 - law)).sum(0))
    often = spread > 3
    assert often.sum() > 20
    assert (np.abs((was - law).sum(0)) <= 4.5 * spread)[often].all()
    surprise = -np.log(law)
    mean = (law * surprise).sum(-1)
    spread = np.sqrt(((law * surprise**2).sum(-1) - mean**2).sum(0))
    off = ((was * surprise).sum(-1) - mean).sum(0)
    assert (np.abs(off) <= 4 * spread).all()
