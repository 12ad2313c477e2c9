"""Packing: a round trip, and every family on packed positions equals the plain pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.layers.packing import Packing
from tests.decode.adversary import CONFIGS, VOCAB, tiny


@pytest.mark.parametrize(("valid", "size"), [([2, 0, 4, 1], 7), ([2, 0, 4, 1], 9), ([0, 0, 1], 3)])
def test_round_trip(valid: list[int], size: int) -> None:
    """What is real comes back to its place; rows without anything are no trouble."""
    x = np.arange(len(valid) * 4 * 2).reshape(len(valid), 4, 2)
    packing = Packing.of(jnp.asarray(valid), 4, size)
    packed = np.asarray(packing.pack(jnp.asarray(x)))
    assert packed.shape == (1, size, 2)
    wanted = np.concatenate([row[:n] for row, n in zip(x, valid, strict=True)])
    np.testing.assert_array_equal(packed[0, : sum(valid)], wanted)
    back = np.asarray(packing.spread(jnp.asarray(packed)))
    for b, n in enumerate(valid):
        np.testing.assert_array_equal(back[b, :n], x[b, :n])


@pytest.mark.parametrize("name", list(CONFIGS))
def test_families_on_packed_positions(name: str) -> None:
    """States, taps and the committed cache agree, behind a cache and with rows that rest."""
    loop = "scan" if name in ("gemma4_e", "qwen3_5") else "unroll"
    target, params = tiny(name, loop)
    rng = np.random.default_rng(0)
    first, tokens = (jnp.asarray(rng.integers(3, VOCAB, (4, n)), jnp.int32) for n in (11, 5))
    start, valid = jnp.asarray([11, 3, 7, 9]), jnp.asarray([5, 1, 0, 3])

    @jax.jit
    def run(params: object) -> tuple:
        cache = target.init_cache(4, 32)
        cache = target.commit(cache, target.forward(params, first, start, cache).update, start)
        plain = target.forward(params, tokens, valid, cache, (0, 2))
        packing = Packing.of(valid, 5, 12)
        packed = target.forward(params, tokens, valid, cache, (0, 2), packing)
        after = [target.commit(cache, out.update, valid) for out in (plain, packed)]
        spread = packing.spread(packed.hidden), jax.vmap(packing.spread)(packed.taps)
        return plain, spread, after

    plain, (hidden, taps), (wanted, found) = run(params)
    real = np.arange(5) < np.asarray(valid)[:, None]
    np.testing.assert_allclose(hidden[real], plain.hidden[real], atol=2e-5)
    np.testing.assert_allclose(taps[:, real], plain.taps[:, real], atol=2e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
