"""The shipped production targets: built whole without memory, and of the sizes published for them.

Facts here were put down by hand from the published tables, not read from our configurations.
"""

import dataclasses
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from specjax.core import paths
from specjax.core.errors import CheckpointError
from specjax.core.params import count, leaves_with_names, shapes
from specjax.targets import TargetConfig, catalog
from specjax.targets.describe import parameter_counts

# Billions as counted from the published tables, digits as printed there: (all, active).
COUNTED = {
    "DeepSeek-V3": ("671.026", "37.55"),
    "Kimi-K2.5": ("1026.4", "32.86"),
    "MiniMax-M2.5": ("228.69", "11.03"),
    "Qwen3-14B": ("14.768", "14.768"),
    "Qwen3-30B-A3B": ("30.532", "3.353"),
    "Qwen3-4B": ("4.022", "4.022"),
    "Qwen3-8B": ("8.191", "8.191"),
    "Qwen3.5-0.8B": ("0.752", "0.752"),
    "Qwen3.5-122B-A10B": ("122.112", "9.771"),
    "Qwen3.5-35B-A3B": ("34.661", "3.455"),
    "Qwen3.5-4B": ("4.206", "4.206"),
    "SmolLM2-135M-Instruct": ("0.134515", "0.134515"),
    "gemma-4-12B-it": ("11.907", "11.907"),
    "gemma-4-26B-A4B-it": ("25.233", "3.823"),
    "gemma-4-31B-it": ("30.697", "30.697"),
    "gemma-4-E2B-it": ("4.629", "4.629"),
    "gemma-4-E4B-it": ("7.463", "7.463"),
}
# Billions as the publishers name them: (all, active).
NAMED = {
    "DeepSeek-V3": (671, 37),
    "Kimi-K2.5": (1000, 32),
    "MiniMax-M2.5": (230, 10),
    "Qwen3-14B": (14.8, None),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-4B": (4.0, None),
    "Qwen3-8B": (8.2, None),
    "Qwen3.5-0.8B": (0.8, None),
    "Qwen3.5-122B-A10B": (122, 10),
    "Qwen3.5-35B-A3B": (35, 3),
    "Qwen3.5-4B": (4, None),
    "SmolLM2-135M-Instruct": (0.135, None),
    "gemma-4-12B-it": (11.95, None),
    "gemma-4-26B-A4B-it": (25.2, 3.8),
    "gemma-4-31B-it": (30.7, None),
    "gemma-4-E2B-it": (5.1, None),
    "gemma-4-E4B-it": (8, None),
}
# Names that a count is more than 1 % off from: (by how much, why).
APART = {
    ("DeepSeek-V3", "active"): (0.015, "the name counts less than two embedding tables"),
    ("Kimi-K2.5", "total"): (0.026, "published as 1T"),
    ("Kimi-K2.5", "active"): (0.027, "the name counts one embedding table"),
    ("MiniMax-M2.5", "active"): (0.103, "the name counts no embeddings"),
    ("Qwen3-30B-A3B", "active"): (0.016, "one digit"),
    ("Qwen3.5-0.8B", "total"): (-0.06, "a rounded name"),
    ("Qwen3.5-122B-A10B", "active"): (-0.023, "a rounded name"),
    ("Qwen3.5-35B-A3B", "active"): (0.152, "a rounded name"),
    ("Qwen3.5-4B", "total"): (0.051, "a rounded name"),
    ("gemma-4-E2B-it", "total"): (-0.092, "the name counts vision and audio"),
    ("gemma-4-E4B-it", "total"): (-0.067, "the name counts vision and audio"),
}
# (longest context, stop ids, eps, rope bases)
FACTS = {
    "DeepSeek-V3": (163840, (1,), 1e-6, {1e4}),
    "Kimi-K2.5": (262144, (163585,), 1e-5, {5e4}),
    "MiniMax-M2.5": (196608, (200020,), 1e-6, {5e6}),
    "Qwen3-14B": (40960, (151643, 151645), 1e-6, {1e6}),
    "Qwen3-30B-A3B": (40960, (151643, 151645), 1e-6, {1e6}),
    "Qwen3-4B": (40960, (151643, 151645), 1e-6, {1e6}),
    "Qwen3-8B": (40960, (151643, 151645), 1e-6, {1e6}),
    "Qwen3.5-0.8B": (262144, (248044, 248046), 1e-6, {1e7}),
    "Qwen3.5-122B-A10B": (262144, (248044, 248046), 1e-6, {1e7}),
    "Qwen3.5-35B-A3B": (262144, (248044, 248046), 1e-6, {1e7}),
    "Qwen3.5-4B": (262144, (248044, 248046), 1e-6, {1e7}),
    "SmolLM2-135M-Instruct": (8192, (2,), 1e-5, {1e5}),
    "gemma-4-12B-it": (262144, (1, 50, 106), 1e-6, {1e4, 1e6}),
    "gemma-4-26B-A4B-it": (262144, (1, 50, 106), 1e-6, {1e4, 1e6}),
    "gemma-4-31B-it": (262144, (1, 50, 106), 1e-6, {1e4, 1e6}),
    "gemma-4-E2B-it": (131072, (1, 50, 106), 1e-6, {1e4, 1e6}),
    "gemma-4-E4B-it": (131072, (1, 50, 106), 1e-6, {1e4, 1e6}),
}


def printed(number, like):
    """A number of parameters in billions, with as many digits as `like`."""
    return f"{number / 1e9:.{len(like.partition('.')[2])}f}"


def sizes(target):
    """Parameters per published name of the tensors that stand around the layers."""
    specs = target.family.specs(dataclasses.replace(target.config, kinds=()))
    tables = {"embedding": specs.embedding, "output": specs.output, "extra": specs.extra}
    named = {s.hf: s.shape for t in tables.values() for _, s in leaves_with_names(t)}
    return {name: math.prod(shape) for name, shape in named.items()}


def test_names() -> None:
    assert set(catalog.names()) == COUNTED.keys() == NAMED.keys() == FACTS.keys()
    assert list(catalog.names()) == sorted(catalog.names(), key=str.lower)


@pytest.mark.parametrize("name", COUNTED)
def test_counts_and_shapes(name: str) -> None:
    target = catalog.read(name).build(TargetConfig(layer_loop="scan"))
    specs = target.specs()
    total, active = parameter_counts(target)
    assert count(specs) == total
    assert (printed(total, COUNTED[name][0]), printed(active, COUNTED[name][1])) == COUNTED[name]

    last = target.info.num_layers

    def run(params, tokens):
        cache = target.init_cache(2, 16, "bfloat16")
        out = target.forward(params, tokens, None, cache, taps=(0, last))
        return out.taps, target.logits(params, out.hidden), target.commit(cache, out.update, n)

    n = jnp.asarray([3, 1])
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    taps, logits, cache = jax.eval_shape(run, shapes(specs, "bfloat16"), tokens)
    assert taps.shape == (2, 2, 3, target.info.hidden)
    assert logits.shape == (2, 3, target.info.vocab)
    assert logits.dtype == jnp.float32
    assert jax.tree.structure(cache) == jax.tree.structure(
        jax.eval_shape(lambda: target.init_cache(2, 16, "bfloat16"))
    )


@pytest.mark.parametrize("name", NAMED)
def test_published_names(name: str) -> None:
    entry = catalog.read(name)
    named = dict(zip(("total", "active"), NAMED[name], strict=True))
    assert (entry.published.total_billions, entry.published.active_billions) == NAMED[name]
    counts = dict(zip(("total", "active"), parameter_counts(entry.build()), strict=True))
    for which, billions in named.items():
        if billions is None:
            continue
        off = counts[which] / 1e9 / billions - 1
        gap, why = APART.get((name, which), (0.0, ""))
        assert round(off, 3) == gap if why else abs(off) < 0.01
        assert not why or entry.published.note  # the entry says why as well


def test_other_ways_to_count() -> None:
    def entry(name):
        target = catalog.read(name).build()
        return parameter_counts(target), sizes(target)

    (_, active), around = entry("MiniMax-M2.5")
    assert printed(active - sum(around.values()), "9.80") == "9.80"
    for name, figure in {"DeepSeek-V3": "36.6", "Kimi-K2.5": "31.7"}.items():
        (_, active), around = entry(name)
        assert printed(active - around["lm_head.weight"], figure) == figure
    for name, figure in {"gemma-4-E2B-it": "2.280", "gemma-4-E4B-it": "4.644"}.items():
        (total, _), around = entry(name)
        assert printed(total - around["model.embed_tokens_per_layer.weight"], figure) == figure


@pytest.mark.parametrize("name", FACTS)
def test_facts_that_sizes_do_not_show(name: str) -> None:
    target = catalog.read(name).build()
    bases = {rope.theta for kind in target.config.kinds for rope in kind.ropes}
    info = target.info
    assert (info.max_context, info.stop_ids, target.config.eps, bases) == FACTS[name]


def test_routers_and_ropes() -> None:
    def last(name):
        return catalog.read(name).build().config.kinds[-1]

    deepseek, kimi = last("DeepSeek-V3"), last("Kimi-K2.5")
    router = deepseek.feed_forward.router
    assert (router.scaling, router.groups, router.top_groups) == (2.5, 8, 4)
    router = kimi.feed_forward.router
    assert (router.scaling, router.groups, router.top_groups) == (2.827, 1, 1)
    for kind, factor in ((deepseek, 40), (kimi, 64)):
        rope = kind.attention.rope
        numbers = dict(rope.scaling)
        assert (rope.kind, rope.dims, numbers["factor"]) == ("yarn", 64, factor)
        assert numbers["original_max_position_embeddings"] == 4096
        # (1 + 0.1 ln factor)^2 / sqrt(192)
        scale = (1 + 0.1 * math.log(factor)) ** 2 / math.sqrt(192)
        assert kind.attention.scale == pytest.approx(scale)
    minimax = last("MiniMax-M2.5")
    assert minimax.block.rope.dims == 64
    assert (minimax.sparse.router.score, minimax.sparse.router.normalise) == ("sigmoid", True)
    qwen = last("Qwen3-30B-A3B").sparse.router
    assert (qwen.score, qwen.normalise) == ("softmax", True)
    for name in ("Qwen3.5-0.8B", "Qwen3.5-35B-A3B", "Qwen3.5-4B", "Qwen3.5-122B-A10B"):
        (rope,) = last(name).ropes
        assert (rope.kind, rope.dims) == ("default", 64)
    for name in (name for name in catalog.names() if name.startswith("gemma-4")):
        config = catalog.read(name).build().config
        assert (config.softcap, config.embed_scale) == (30, config.hidden**0.5)
        ropes = {r.kind: r for kind in config.kinds for r in kind.ropes}
        assert ropes["default"].dims == 256
        assert ropes["proportional"].dims == 512
        assert dict(ropes["proportional"].scaling)["partial_rotary_factor"] == 0.25


def test_what_is_not_verified_is_marked() -> None:
    marked = {name: catalog.read(name).unverified for name in catalog.names()}
    marked = {name: facts for name, facts in marked.items() if facts}
    assert marked.keys() == {"DeepSeek-V3", "Kimi-K2.5", "MiniMax-M2.5", "Qwen3.5-4B"}
    for fact in (fact for facts in marked.values() for fact in facts):
        field, _, why = fact.partition(": ")
        assert field and why
    assert all(catalog.read(name).source for name in catalog.names())


def test_an_entry_is_a_published_configuration() -> None:
    entry = catalog.read("Kimi-K2.5")
    assert "specjax" not in entry.config
    assert entry.config["text_config"]["model_type"] == "kimi_k2"
    assert entry.build() == entry.build()
    assert entry.build().config.layer_loop == "scan"  # it is packed
    assert entry.build(TargetConfig(layer_loop="unroll")).config.layer_loop == "unroll"


def test_unknown_name() -> None:
    with pytest.raises(CheckpointError, match=r"no target 'qwen3-8b' .* did you mean 'Qwen3-8B'"):
        catalog.read("qwen3-8b")
    with pytest.raises(CheckpointError, match=r"no target '\.\./train'"):
        catalog.read("../train")


def test_malformed_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "targets").mkdir()
    monkeypatch.setattr(paths, "configs_dir", lambda: tmp_path)
    assert catalog.names() == ()
    (tmp_path / "targets" / "a.json").write_text('{"model_type": "llama", "specjax": {}}')
    with pytest.raises(CheckpointError, match=r"a\.json: .* lacks source, published, unverified"):
        catalog.read("a")
    (tmp_path / "targets" / "a.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        catalog.read("a")


def test_stop_ids_without_a_generation_configuration(tmp_path, monkeypatch) -> None:
    (tmp_path / "targets").mkdir()
    section = {"source": "x", "published": {"total_billions": 1}, "unverified": []}
    monkeypatch.setattr(paths, "configs_dir", lambda: tmp_path)
    for config, stops in (
        ({"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [5, 4], "text_config": {"eos_token_id": 5}}, (4, 5)),
        ({"text_config": {"eos_token_id": 0}}, (0,)),
        ({}, ()),
    ):
        (tmp_path / "targets" / "a.json").write_text(json.dumps({**config, "specjax": section}))
        assert catalog.read("a").stop_ids == stops


def test_names_are_light() -> None:
    code = """
import sys
from specjax.targets import catalog
assert catalog.names()
assert not {"jax", "flax", "numpy"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
