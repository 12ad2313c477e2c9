"""What the tests of a dense family share: its fixture, and live parity with transformers."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from specjax import targets

from .reference import write_checkpoint

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def tapped(target, params, ids):
    """Return (logits, every residual stream, final hidden) of one pass."""
    taps = tuple(range(target.info.num_layers + 1))

    @jax.jit
    def run(params, ids):
        out = target.forward(params, ids, taps=taps)
        return target.logits(params, out.hidden), out.taps, out.hidden

    return run(params, jnp.asarray(ids))


def check_tap_map(family):
    """F5: tap i is the residual stream after i layers, 0 the embedding, L before the last norm."""
    target, params = targets.load(FIXTURES / family)
    want = load_file(FIXTURES / family / "expected.safetensors")
    logits, streams, hidden = tapped(target, params, want["input_ids"])
    np.testing.assert_array_equal(streams[0], params.embedding[want["input_ids"]])
    for i, stream in enumerate(want["hidden_states"]):
        np.testing.assert_allclose(streams[i], stream, atol=1e-4, err_msg=f"tap {i}")
    assert len(streams) == len(want["hidden_states"])
    np.testing.assert_allclose(hidden, want["final_hidden"], atol=1e-4)
    # F1: a teacher made of captured states is the target itself.
    np.testing.assert_allclose(logits, want["logits"], atol=1e-4)
    np.testing.assert_allclose(target.logits(params, hidden), logits, atol=1e-5)


def check_live(family, seed, path):
    """Logits and all hidden states of a random configuration agree with transformers."""
    ids, logits, states = write_checkpoint(family, seed, path, old_spelling=seed % 2 == 1)
    config = json.loads((path / "config.json").read_text())
    assert ("rope_parameters" in config) == (seed % 2 == 0)
    target, params = targets.load(path)
    got_logits, got_states, _ = tapped(target, params, ids)
    for got, want in ((got_states, states), (got_logits, logits)):
        scale = max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got, want, atol=1e-4 * scale)
