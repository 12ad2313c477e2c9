"""F19's ground: a packed row gives for each of its texts what the text gives alone."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import targets
from specjax.layers.documents import Documents
from specjax.targets import TargetConfig
from tests.targets.parity import FIXTURES

# Rows of texts, one shorter than a convolution, one longer than a window or a delta-net chunk's
# block; pads behind two of the rows.
ROWS = ((9, 2, 20), (1, 14), (23,))
LENGTH = 32
FAMILIES = {
    "llama": "unroll",
    "qwen3": "scan",
    "qwen3_moe": "unroll",
    "minimax_m2": "unroll",
    "kimi_k25": "scan",
    "gemma4_moe": "unroll",
    "gemma4_vl": "unroll",
    "qwen3_5_moe": "unroll",
    "qwen3_5_vl_mtp": "scan",
}


def packed(vocab: int, rng: np.random.Generator) -> tuple[np.ndarray, Documents, list[Any]]:
    """Return (ids, documents, (row, start, ids) of each text)."""
    ids = rng.integers(0, vocab, (len(ROWS), LENGTH)).astype(np.int32)
    index, positions = np.full_like(ids, -1), np.zeros_like(ids)
    texts = []
    for b, lengths in enumerate(ROWS):
        start = 0
        for d, n in enumerate(lengths):
            index[b, start : start + n], positions[b, start : start + n] = d, np.arange(n)
            texts.append((b, start, ids[b, start : start + n]))
            start += n
    return ids, Documents(jnp.asarray(index), jnp.asarray(positions)), texts


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_alone(name: str) -> None:
    """Hidden states, every tap, and keys and values, of each text of packed rows."""
    target, params = targets.load(FIXTURES / name, how=TargetConfig(layer_loop=FAMILIES[name]))
    taps = tuple(range(target.info.num_layers + 1))
    readable = tuple(i for i, layer in enumerate(target.info.key_layers) if layer)
    ids, documents, texts = packed(target.info.vocab, np.random.default_rng(3))

    @jax.jit
    def run(params: Any, ids: Any, valid: Any, documents: Any) -> Any:
        out = target.forward(params, ids, valid, None, taps, documents=documents)
        return out.hidden, out.taps, target.entries(out.update, readable)

    valid = np.array([sum(lengths) for lengths in ROWS], np.int32)
    hidden, streams, keys = run(params, ids, valid, documents)
    alone = np.zeros((len(texts), LENGTH), np.int32)
    for i, (_, _, text) in enumerate(texts):
        alone[i, : len(text)] = text
    lengths = np.array([len(text) for _, _, text in texts], np.int32)
    want_hidden, want_streams, want_keys = run(params, alone, lengths, None)
    for i, (b, start, text) in enumerate(texts):
        n = len(text)
        pairs = [(hidden[b, start : start + n], want_hidden[i, :n])]
        pairs.append((streams[:, b, start : start + n], want_streams[:, i, :n]))
        for got, want in zip(jax.tree.leaves(keys), jax.tree.leaves(want_keys), strict=True):
            pairs.append((got[b, :, start : start + n], want[i, :, :n]))
        for got, want in pairs:
            scale = max(1.0, float(np.abs(want).max()))
            np.testing.assert_allclose(got, want, atol=1e-5 * scale, err_msg=f"text {i}")
    # The documents do matter: without them the second text of a row sees the first.
    together = run(params, ids, valid, None)[0]
    assert np.abs(together[0, 9:31] - hidden[0, 9:31]).max() > 1e-2


def test_only_at_the_start() -> None:
    """A cache or a ragged batch is refused beside documents."""
    target, params = targets.load(FIXTURES / "llama")
    ids, documents, _ = packed(target.info.vocab, np.random.default_rng(0))
    cache = target.init_cache(len(ROWS), 64)
    with pytest.raises(ValueError, match=re.escape("no cache, no packing")):
        target.forward(params, jnp.asarray(ids), None, cache, documents=documents)
