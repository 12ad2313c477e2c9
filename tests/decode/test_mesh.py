"""Rounds spread over eight devices: the texts of one device, and no more talk than needed."""

from __future__ import annotations

import collections
import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import ConfigError
from specjax.core.mesh_config import MeshConfig
from specjax.core.sharding import SERVED, Layout
from specjax.decode import Engine, EngineConfig, Request
from specjax.decode import engine as engine_module
from specjax.decode.placement import put_weights, shardings
from specjax.heads.base import borrow
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from tests.decode.adversary import tiny

pytestmark = pytest.mark.devices8
# Programs run once or twice: compile them quickly rather than well.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
VOCAB, LANES, NEW = 96, 8, 4
COMMON = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
    "intermediate_size": 64,
}
WIDE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"moe_intermediate_size": 16},
    "qwen3_5": {"linear_num_key_heads": 8, "linear_num_value_heads": 16},
    "gemma4": {"attention_k_eq_v": False, "num_global_key_value_heads": 8},
    "gemma4_moe": {"moe_intermediate_size": 16},
    "gemma4_e": {"vocab_size_per_layer_input": VOCAB},
    "deepseek_v3": {"moe_intermediate_size": 16, "v_head_dim": 16},
    "minimax_m2": {"intermediate_size": 16},
}
MESHES = {
    "data": MeshConfig(data=8),
    "tensor": MeshConfig(tensor=8),
    "both": MeshConfig(data=2, tensor=4),
    "expert": MeshConfig(tensor=2, expert=4),
}
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def wide(name: str, loop: str = "unroll") -> tuple[Any, Any]:
    return tiny(name, loop, **COMMON | WIDE[name])


def verify_step(target: Any) -> Any:
    """Return a function (weights, cache, tokens) to (logits, cache after some were accepted)."""

    def run(params: Any, cache: Any, tokens: jax.Array) -> Any:
        out = target.forward(params, tokens, jnp.full(LANES, NEW), cache)
        accepted = jnp.arange(LANES) % (NEW + 1)
        return target.logits(params, out.hidden), target.commit(cache, out.update, accepted)

    return run


def inputs(target: Any, params: Any) -> tuple[Any, jax.Array]:
    """Return (a cache that holds prompts of 9 to 16 tokens, the tokens to verify)."""
    rng = np.random.default_rng(1)
    prompts = jnp.asarray(rng.integers(3, VOCAB, (LANES, 16)), jnp.int32)

    @jit
    def fill(params: Any) -> Any:
        cache = target.init_cache(LANES, 32, "float32")
        out = target.forward(params, prompts, jnp.full(LANES, 16), cache)
        return target.commit(cache, out.update, jnp.arange(9, 17))

    return fill(params), jnp.asarray(rng.integers(3, VOCAB, (LANES, NEW)), jnp.int32)


def on_mesh(target: Any, params: Any, cache: Any, tokens: Any, mesh: MeshConfig) -> Any:
    """Return (the compiled step, its arguments) on a mesh."""
    layout = Layout.of(mesh, SERVED)
    where = shardings(layout, cache, LANES)
    args = (
        put_weights(layout, target.specs(), params, "target"),
        jax.device_put(cache, where),
        jax.device_put(tokens, layout.rows),
    )
    target = dataclasses.replace(target, layout=layout)
    return jit(verify_step(target), out_shardings=(None, where)).lower(*args).compile(), args


@pytest.mark.parametrize("name", sorted(WIDE))
def test_every_family_computes_what_one_device_does(name: str) -> None:
    target, params = wide(name)
    cache, tokens = inputs(target, params)
    wanted = jax.device_get(jit(verify_step(target))(params, cache, tokens))
    sparse = "experts" in str(target.specs())
    for mesh in ("both", "expert") if sparse else ("both",):
        step, args = on_mesh(target, params, cache, tokens, MESHES[mesh])
        for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=mesh)


def collectives(program: Any) -> dict[str, collections.Counter]:
    """Count a program's collectives by the layer (or place in the pattern) they come from."""
    found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for line in program.as_text().splitlines():
        if kind := COLLECTIVE.search(line):
            place = re.search(r'op_name="[^"]*?[/(](layer\d+|position\d+)', line)
            found[place[1] if place else "outside"][kind[1]] += 1
    return found


SUMS = {"all-reduce": 2}  # the outputs of attention and of the feed-forward are added up
THREE = {"all-reduce": 3}
GATHERED = {"all-reduce": 2, "all-gather": 1}  # and the inputs of a delta net's convolution
TALK: dict[tuple[str, str], list[dict[str, int]]] = {
    ("llama", "tensor"): [SUMS] * 3,
    ("gemma4", "tensor"): [SUMS] * 3,
    ("gemma4_e", "tensor"): [THREE] * 4,  # a layer's own inputs add to its stream too
    ("qwen3_moe", "tensor"): [SUMS] * 3,
    ("qwen3_moe", "expert"): [SUMS] * 3,
    ("gemma4_moe", "tensor"): [SUMS] * 3,
    ("gemma4_moe", "expert"): [THREE] * 3,  # the MLP beside the experts is split another way
    ("deepseek_v3", "tensor"): [SUMS] * 3,
    ("deepseek_v3", "expert"): [SUMS, THREE, THREE],  # and so is the shared expert
    ("minimax_m2", "expert"): [THREE] * 3,  # its norms go over all heads
    ("qwen3_5", "tensor"): [GATHERED, GATHERED, GATHERED, SUMS],
}


@pytest.mark.parametrize(("name", "mesh"), TALK)
def test_talk_of_a_layer(name: str, mesh: str) -> None:
    """What devices say to each other grows with depth as written above; lanes need none of it."""
    target, params = wide(name)
    cache, tokens = inputs(target, params)
    found = collectives(on_mesh(target, params, cache, tokens, MESHES[mesh])[0])
    outside = found.pop("outside")
    assert [found[f"layer{i}"] for i in range(len(found))] == TALK[name, mesh]
    # The rows of the embedding, split over the vocabulary; what all layers' own inputs come from.
    assert outside == {"all-reduce": 1} | ({"all-gather": 1} if name == "gemma4_e" else {})
    if mesh == "tensor":
        assert not collectives(on_mesh(target, params, cache, tokens, MESHES["data"])[0])


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_talk_of_a_scan(name: str) -> None:
    """The loop over layers holds the talk of one layer."""
    target, params = wide(name, "scan")
    cache, tokens = inputs(target, params)
    found = collectives(on_mesh(target, params, cache, tokens, MESHES["tensor"])[0])
    assert found == {"position0": SUMS, "outside": {"all-reduce": 1}}


def test_talk_without_a_layout() -> None:
    """Left to the compiler, experts gather tokens: what the tests above would see."""
    target, params = wide("qwen3_moe")
    cache, tokens = inputs(target, params)
    layout = Layout.of(MESHES["data"], SERVED)
    where = shardings(layout, cache, LANES)
    args = (params, jax.device_put(cache, where), jax.device_put(tokens, layout.rows))
    step = jit(verify_step(target), out_shardings=(None, where)).lower(*args).compile()
    assert all(kinds["all-gather"] for kinds in collectives(step).values())


def test_weights_and_caches_are_nowhere_whole() -> None:
    target, params = wide("llama")
    cache, tokens = inputs(target, params)
    step, args = on_mesh(target, params, cache, tokens, MESHES["both"])
    one = jit(verify_step(target)).lower(params, cache, tokens).compile()
    share = step.memory_analysis().argument_size_in_bytes
    share /= one.memory_analysis().argument_size_in_bytes
    matrices = [x for x in jax.tree.leaves(args[0]) if x.ndim == 2]
    assert all(x.addressable_shards[0].data.nbytes * 4 == x.nbytes for x in matrices)
    assert 1 / 8 < share < 1 / 4  # weights in 4 parts, caches in 8


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_texts_are_those_of_one_device(name: str) -> None:
    """Eleven prompts through eight lanes with EAGLE-3: texts, acceptance, programs compiled."""
    target, params = wide(name)
    block = target.info.draft_block
    assert block is not None
    head = Eagle3Head.for_target(target.info, block, Eagle3Config(taps=(1, 2, 3), mlp=16))
    weights = head.init(jax.random.key(0), borrow(target, params))
    rng = np.random.default_rng(2)
    requests = [Request(tuple(rng.integers(3, VOCAB, 9 + i).tolist()), 20) for i in range(11)]
    base = EngineConfig(num_speculative_tokens=3, concurrency=LANES, capacity=64)
    wanted = Engine(target, params, head, weights, base).generate(requests)
    for mesh in ("tensor", "both"):
        config = dataclasses.replace(base, mesh=MESHES[mesh])
        engine = Engine(target, params, head, weights, config)
        before = engine_module._run_rounds._cache_size()
        found = engine.generate(requests)
        assert [r.token_ids for r in found] == [r.token_ids for r in wanted], mesh
        assert [r.accepted for r in found] == [r.accepted for r in wanted], mesh
        assert engine_module._run_rounds._cache_size() == before + 1


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        ({}, {"data": 4}, r"Engine\.concurrency 6 does not divide over data x fsdp of 4"),
        ({"num_key_value_heads": 4}, {"tensor": 8}, "kv_heads of 4 does not divide"),
        ({"vocab_size": 94}, {"tensor": 4}, "embed_tokens.weight: vocab of 94 does not divide"),
    ],
)
def test_what_does_not_divide_is_refused(
    changes: dict[str, int], mesh: dict[str, int], message: str
) -> None:
    target, params = tiny("llama", **COMMON | changes)
    config = EngineConfig(num_speculative_tokens=0, concurrency=6, mesh=MeshConfig(**mesh))
    with pytest.raises(ConfigError, match=message):
        engine = Engine(target, params, config=config)
        engine.generate([Request((1, 2, 3), 4)])
