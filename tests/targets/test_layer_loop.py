"""Both layer loops compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import targets
from specjax.core.params import init_params
from specjax.core.stack import Stacked, group, ungroup
from specjax.decode import Engine, EngineConfig, Request
from specjax.targets import TargetConfig
from specjax.targets.decoder import DecoderWeights

CONFIG = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    """(unrolled target, its weights), (scanned target, the same weights)."""
    one = targets.from_config(CONFIG)
    two = targets.from_config(CONFIG, TargetConfig(layer_loop="scan"))
    params = init_params(one.specs(), jax.random.key(0), scale=0.2)
    stacked = params.replace(layers=group(params.layers, two.config.segments))
    return (one, params), (two, stacked)


def test_weights_are_stacked_as_the_specs_say(pair):
    (_, params), (two, stacked) = pair
    assert isinstance(stacked, DecoderWeights) and isinstance(stacked.layers[0], Stacked)
    shapes = jax.tree.map(lambda spec: spec.shape, two.specs(), is_leaf=lambda s: hasattr(s, "hf"))
    assert jax.tree.map(jnp.shape, stacked) == shapes
    back = ungroup(stacked.layers, two.config.segments)
    jax.tree.map(np.testing.assert_array_equal, back, params.layers)


@pytest.mark.parametrize("taps", [(), (0,), (5, 0, 3), (1, 2, 4), (4,), (3, 3)])
def test_hidden_states_and_taps_agree_f4(pair, taps):
    """F4: taps of any part of the stack, in the order asked, whichever way the layers run."""
    ids = jnp.arange(14).reshape(2, 7) + 3
    outs = [
        jax.jit(lambda p, ids, t=target: t.forward(p, ids, taps=taps))(params, ids)
        for target, params in pair
    ]
    assert outs[0].taps.shape == outs[1].taps.shape == (len(taps), 2, 7, 32)
    np.testing.assert_allclose(outs[0].taps, outs[1].taps, atol=1e-5)
    np.testing.assert_allclose(outs[0].hidden, outs[1].hidden, atol=1e-5)
    if taps == (4,):
        assert np.abs(outs[1].taps).max() > 0.1  # captured, not left at zero


def test_decoding_agrees_with_refilled_lanes(pair):
    requests = [Request(tuple(range(3, 3 + n)), max_new_tokens=9) for n in (4, 11, 2, 6)]
    texts = []
    for target, params in pair:
        engine = Engine(target, params, config=EngineConfig(concurrency=2), stop_ids=())
        texts.append([result.token_ids for result in engine.generate(requests)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 4
