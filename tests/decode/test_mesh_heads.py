"""Every head, and packed weights, spread over eight devices: the rounds of one device."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import ConfigError
from specjax.core.mesh_config import MeshConfig
from specjax.core.packed import is_packed
from specjax.core.params import leaves_with_names, map_specs
from specjax.core.sharding import SERVED, Layout
from specjax.decode.placement import put_weights, shardings
from specjax.decode.round import Decoder, Weights, init_state, one_round
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
from specjax.io.quant import Quantisation, pack_specs
from tests.decode import matrix
from tests.decode.adversary import tiny

pytestmark = pytest.mark.devices8
# Programs run a few times: compile them quickly rather than well.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
LANES, DRAFTS, ROUNDS = 8, 3, 3
WIDE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "v_head_dim": 16,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": 8,
}
# Each head on a mesh of another shape. DeepSeek's MTP modules have experts of their own.
PAIRS = {
    "eagle3": ("qwen3_moe", MeshConfig(data=8)),
    "dflash": ("qwen3_moe", MeshConfig(tensor=8)),
    "dspark": ("qwen3_moe", MeshConfig(data=2, tensor=4)),
    "mtp": ("deepseek_v3", MeshConfig(tensor=2, expert=4)),
    "gemma4_mtp": ("gemma4_moe", MeshConfig(tensor=2, expert=4)),
}
GATHER = re.compile(r" = \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(")


def make_head(kind: str, target: Any) -> tuple[Any, Any]:
    if kind != "gemma4_mtp":
        return matrix.make(kind, target.info)
    settings = Gemma4MtpConfig(layers=2, hidden=16, heads=8, mlp=24)
    head = Gemma4MtpHead.for_target(target.info, settings)
    rng = np.random.default_rng(4)

    def weight(spec: Any) -> jax.Array:
        return jnp.asarray(rng.normal(spec.init == "ones", 0.3, spec.shape), jnp.float32)

    return head, map_specs(weight, head.specs())


def started(decoder: Decoder) -> Any:
    """Return lanes that hold a token each and nothing in their caches; two of them are idle."""
    state = init_state(decoder, LANES, 24, "float32")
    lane = jnp.arange(LANES, dtype=jnp.int32)
    return state.replace(
        tokens=state.tokens.at[:, 0].set(5 + 7 * lane),
        lengths=jnp.ones_like(lane),
        budget=jnp.full_like(lane, 20),
        done=lane % 4 == 3,
    )


def compiled(decoder: Decoder, weights: Weights, state: Any) -> Any:
    return jit(partial(one_round, decoder)).lower(weights, state).compile()


def after(step: Any, weights: Weights, state: Any) -> Any:
    for _ in range(ROUNDS):
        state = step(weights, state)
    return jax.device_get(state)


@pytest.mark.parametrize("kind", PAIRS)
def test_rounds_of_every_head(kind: str) -> None:
    """Tokens, counters, and what caches and heads keep; weights stay where they are."""
    family, mesh = PAIRS[kind]
    target, params = tiny(family, **WIDE)
    head, drafting = make_head(kind, target)
    one = Decoder(target, head, DRAFTS, ())
    weights, start = Weights(target=params, head=drafting), started(one)
    wanted = after(compiled(one, weights, start), weights, start)
    layout = Layout.of(mesh, SERVED)
    spread = dataclasses.replace(target, layout=layout)
    many = dataclasses.replace(one, target=spread, layout=layout)
    placed = Weights(
        target=put_weights(layout, target.specs(), params, "target"),
        head=put_weights(layout, head.specs(), drafting, "head"),
    )
    start = jax.device_put(start, shardings(layout, start, LANES))
    step = compiled(many, placed, start)
    found = after(step, placed, start)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert (wanted.lengths[::4] > ROUNDS).all() and (wanted.lengths[3::4] == 1).all()
    shapes = [[int(n) for n in m.split(",")] for m in GATHER.findall(step.as_text())]
    # Each device's best token of its part of the vocabulary, but never a weight.
    assert max(map(math.prod, shapes), default=0) <= LANES * mesh.devices


def stored(target: Any, kind: str) -> Any:
    """Return a target's specs with every product's weight in packed storage."""
    published = [spec for _, each in leaves_with_names(target.specs()) for spec in each.published()]
    products = [spec.hf for spec in published if "_proj." in spec.hf]
    suffix = {"int4": "_packed", "fp8": "_scale_inv"}[kind]
    block = {"int4": (1, 8), "fp8": (8, 8)}[kind]
    return pack_specs(
        target.specs(), {hf + suffix: () for hf in products}, Quantisation(kind, block)
    )


def drawn(specs: Any) -> Any:
    """Return random weights, codes and scales."""
    rng = np.random.default_rng(6)

    def weight(spec: Any) -> jax.Array:
        if spec.dtype == "uint8":  # float8 from 2^-4 to 1, of either sign
            bits = rng.integers(0x18, 0x38, spec.shape) + 128 * rng.integers(0, 2, spec.shape)
            return jnp.asarray(bits, jnp.uint8)
        if spec.dtype == "int32":
            return jnp.asarray(rng.integers(-(2**31), 2**31, spec.shape), jnp.int32)
        if "scale" in spec.hf:
            return jnp.asarray(rng.uniform(0.05, 0.2, spec.shape), jnp.float32)
        return jnp.asarray(rng.normal(spec.init == "ones", 0.3, spec.shape), jnp.float32)

    return map_specs(weight, specs)


def logits_of(target: Any, tokens: jax.Array) -> Any:
    return lambda params: target.logits(params, target.forward(params, tokens).hidden)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_packed_weights(kind: str) -> None:
    """Experts and all else, scanned: what one device computes, and no weight is gathered."""
    target, _ = tiny("qwen3_moe", "scan", **WIDE)
    specs = stored(target, kind)
    assert any(is_packed(x) for x in jax.tree.leaves(specs, is_leaf=is_packed))
    params, tokens = drawn(specs), jnp.arange(32, dtype=jnp.int32).reshape(8, 4) + 5
    wanted = jit(logits_of(target, tokens))(params)
    layout = Layout.of(MeshConfig(tensor=2, expert=4), SERVED)
    spread = dataclasses.replace(target, layout=layout)
    placed = jax.device_put(params, layout.weights(specs))
    step = jit(logits_of(spread, tokens)).lower(placed).compile()
    np.testing.assert_allclose(step(placed), wanted, rtol=1e-4, atol=1e-4)
    assert not GATHER.search(step.as_text())
    with pytest.raises(ConfigError, match="held in packed storage: load it onto the mesh"):
        put_weights(layout, target.specs(), params, "target")


def test_packed_weights_that_scales_cut_are_refused() -> None:
    """Half a block of rows on a device: it would take the scales of other rows."""
    target, _ = tiny("qwen3_moe", "scan", **WIDE)
    layout = Layout.of(MeshConfig(tensor=4), SERVED)
    spread = dataclasses.replace(target, layout=layout)
    params = drawn(stored(target, "fp8"))
    with pytest.raises(ConfigError, match=r"mlp of 16 in blocks of 8 .* not divide over tensor of"):
        jax.eval_shape(logits_of(spread, jnp.ones((8, 4), jnp.int32)), params)
