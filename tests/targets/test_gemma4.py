"""Gemma 4: fixtures, live parity with transformers, windows, shared keys, configurations."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scripts.fixture_checks.targets import chunked, full_pass, greedy, padded
from specjax import targets
from specjax.core.errors import CheckpointError
from specjax.core.params import leaves_with_names, map_specs
from specjax.core.stack import group
from specjax.decode import Engine, EngineConfig, Request
from specjax.targets import TargetConfig

from .parity import FIXTURES, tapped
from .reference_gemma4 import KINDS, write_checkpoint

NAMES = ("gemma4_moe", "gemma4_vl")  # a text-only save with experts, a release of the E series
LOOPS = ("unroll", "scan")
VOCAB, WINDOW, LENGTH = 61, 5, 34
ROPES = {
    KINDS["S"]: {"rope_type": "default", "rope_theta": 100.0},
    KINDS["F"]: {
        "rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
LARGE = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 5,
    "layer_types": [KINDS[letter] for letter in "SSSSF"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 6,
    "global_head_dim": 8,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 5.0,
    "rope_parameters": ROPES,
    "eos_token_id": [1, 106],
}
SMALL = LARGE | {
    "num_hidden_layers": 7,
    "layer_types": [KINDS[letter] for letter in "SSFSSSF"],
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
}
SPARSE = LARGE | {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 7,
}


@functools.cache
def random_weights(name):
    """Weights of an unrolled target that let every feature be seen."""
    config = {"large": LARGE, "small": SMALL, "sparse": SPARSE}[name]
    target = targets.from_config(config)
    rng = np.random.default_rng(5)

    def draw(spec):
        mean = 1.0 if spec.init == "ones" else 0.0
        return jnp.asarray(rng.normal(mean, 0.3, spec.shape), jnp.float32)

    return config, map_specs(draw, target.specs())


def build(name, loop="unroll"):
    config, params = random_weights(name)
    target = targets.from_config(config, TargetConfig(layer_loop=loop))
    return target, params.replace(layers=group(params.layers, target.config.segments))


# Compiling is all that takes time here.
compiled = functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": "0"}
)


@compiled
def run(target, params, tokens, cache=None):
    """(hidden, logits, update, every residual stream) of one pass."""
    out = target.forward(params, tokens, cache=cache, taps=tuple(range(target.info.num_layers + 1)))
    return out.hidden, target.logits(params, out.hidden), out.update, out.taps


@compiled
def commit(target, cache, update, n):
    return target.commit(cache, update, n)


def some_tokens(batch=2, length=LENGTH):
    return np.random.default_rng(1).integers(0, VOCAB, (batch, length)).astype(np.int32)


def load_fixture(name, loop):
    target, params = targets.load(FIXTURES / name, how=TargetConfig(layer_loop=loop))
    return target, params, load_file(FIXTURES / name / "expected.safetensors")


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("gemma4_moe", "unroll"),
        ("gemma4_vl", "scan"),
        pytest.param("gemma4_moe", "scan", marks=pytest.mark.slow),
        pytest.param("gemma4_vl", "unroll", marks=pytest.mark.slow),
    ],
)
def test_fixture_and_tap_map_f5(name, loop):
    """F5: tap 0 is the scaled embedding, tap i the stream after i layers, L before the norm."""
    target, params, want = load_fixture(name, loop)
    ids = want["input_ids"]
    got = full_pass(target, params, ids)
    assert got["hidden_states"].shape == want["hidden_states"].shape
    scaled = np.asarray(params.embedding)[ids] * np.float32(np.sqrt(32))
    np.testing.assert_array_equal(got["hidden_states"][0], scaled)
    np.testing.assert_array_equal(target.embed(params, ids), scaled)
    got["chunk_logits"] = chunked(target, params, ids, 16)
    for tensor, value in got.items():
        np.testing.assert_allclose(value, want[tensor], atol=1e-4, err_msg=tensor)
    again = target.logits(params, got["final_hidden"])
    np.testing.assert_allclose(again, got["logits"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", NAMES)
def test_fixture_padded_and_decoded(name, loop):
    target, params, want = load_fixture(name, loop)
    got = padded(target, params, want["padded_input_ids"], want["attention_mask"] != 0)
    got |= greedy(target, params, want["greedy_prompt"], want["greedy_ids"].shape[1])
    for tensor, value in got.items():
        np.testing.assert_allclose(value, want[tensor], atol=1e-4, err_msg=tensor)


def check_live(seed, path, loop="unroll", norm_weight=None):
    ids, logits, states = write_checkpoint(seed, path, norm_weight)
    config = json.loads((path / "config.json").read_text())
    assert ("per_layer_config" in config) == (seed % 2 == 0)
    target, params = targets.load(path, how=TargetConfig(layer_loop=loop))
    got_logits, got_states, _ = tapped(target, params, ids)
    for got, want in ((got_states, states), (got_logits, logits)):
        scale = max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got, want, atol=1e-4 * scale)
    return target


@pytest.mark.torch
@pytest.mark.parametrize(
    "seed",
    [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (0, *range(2, 14)))],
)
def test_live_parity_on_random_configurations(seed, tmp_path):
    pytest.importorskip("torch")
    check_live(seed, tmp_path, LOOPS[seed % 2])


@pytest.mark.torch
def test_norm_weights_are_plain_f12(tmp_path):
    """F12: a toy whose norms all weigh 0.5; with 1 + w they would weigh three times as much."""
    pytest.importorskip("torch")
    check_live(4, tmp_path, norm_weight=0.5)


def test_an_unknown_family_is_refused_f12():
    with pytest.raises(
        CheckpointError, match=r"model_type 'gemma4_txt' is not supported.*gemma4_text"
    ):
        targets.from_config(LARGE | {"model_type": "gemma4_txt"})


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("small", "scan"),
        ("large", "unroll"),
        ("sparse", "scan"),
        pytest.param("small", "unroll", marks=pytest.mark.slow),
        pytest.param("large", "scan", marks=pytest.mark.slow),
        pytest.param("sparse", "unroll", marks=pytest.mark.slow),
    ],
)
def test_windows_that_wrap_equal_the_full_pass(name, loop):
    """Rings of 5 slots turn six times over; pieces of 7 are longer than the window."""
    target, params = build(name, loop)
    tokens = some_tokens()
    want = run(target, params, tokens)[0]
    cache, done, rng = target.init_cache(2, LENGTH + 8), np.zeros(2, int), np.random.default_rng(2)
    while (left := LENGTH - done).any():
        # What follows the accepted tokens is another draft in each round, never committed.
        n = np.minimum(rng.integers(0, 8, 2), left)
        block = rng.integers(0, VOCAB, (2, 7)).astype(np.int32)
        for b in range(2):
            block[b, : n[b]] = tokens[b, done[b] : done[b] + n[b]]
        hidden, _, update, _ = run(target, params, block, cache)
        cache = commit(target, cache, update, jnp.asarray(n))
        for b in range(2):
            expected = want[b, done[b] : done[b] + n[b]]
            np.testing.assert_allclose(hidden[b, : n[b]], expected, atol=2e-4)
        done += n
    assert cache.layers[0] is not None and list(cache.lengths) == [LENGTH, LENGTH]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["large", "small", "sparse"])
def test_engine_equals_full_passes(name):
    """Greedy texts past several windows, two lanes refilled: as without any cache."""
    target, params = build(name)
    prompts = [
        tuple(map(int, row[:n])) for row, n in zip(some_tokens(4), (3, 12, 7, 1), strict=True)
    ]
    settings = EngineConfig(concurrency=2, prefill_chunk=8)
    engine = Engine(target, params, config=settings, stop_ids=())
    got = [r.token_ids for r in engine.generate([Request(p, 20) for p in prompts])]
    for prompt, answer in zip(prompts, got, strict=True):
        text = np.zeros((1, LENGTH), np.int32)
        text[0, : len(prompt) + 20] = (*prompt, *answer)
        best = np.asarray(run(target, params, jnp.asarray(text))[1]).argmax(-1)[0]
        np.testing.assert_array_equal(best[len(prompt) - 1 : len(prompt) + 19], answer)


def test_layers_that_share_keep_nothing():
    target, params = build("small")
    assert target.info.layer_kinds == ("window", "window", "full") + ("shared",) * 4
    cache = target.init_cache(2, 16)
    assert [entry is None for entry in cache.layers] == [False] * 3 + [True] * 4
    update = jax.eval_shape(lambda p: target.forward(p, some_tokens(), cache=cache), params).update
    assert [new is None for new in update] == [False] * 3 + [True] * 4
    widths = [layer.mlp.gate.shape[0] for layer in params.layers]
    assert widths == [28] * 3 + [56] * 4  # double where they share
    for i, layer in enumerate(params.layers):
        owned = [getattr(layer.attention, name) is not None for name in ("k", "v", "k_norm")]
        assert owned == [i < 3] * 3


@pytest.mark.parametrize(("label", "source", "other"), [("sliding", 1, 0), ("full", 2, None)])
def test_the_last_layer_of_a_kind_lends_its_keys(label, source, other):
    """Its keys count in all layers that share; those of an earlier one only through the stream."""
    target, params = build("small")
    shared = [i for i, k in enumerate(target.config.kinds) if k.label == label and k.cache is None]
    tokens = some_tokens(1, 4)
    ones = jax.tree.map(jnp.zeros_like, [params.layers[i].attention.o for i in range(7)])

    def streams(changed):
        """Taps where only the first layer that shares with `label` attends at all."""
        layers = list(params.layers)
        for i in range(7):
            attention = layers[i].attention
            if i != shared[0]:
                attention = attention.replace(o=ones[i])
            if i == changed:
                attention = attention.replace(k_norm=attention.k_norm * 2)
            layers[i] = layers[i].replace(attention=attention)
        return np.asarray(run(target, params.replace(layers=tuple(layers)), tokens)[3])

    before, after = streams(None), streams(source)
    np.testing.assert_array_equal(after[: shared[0] + 1], before[: shared[0] + 1])
    assert np.abs(after[shared[0] + 1] - before[shared[0] + 1]).max() > 1e-3
    if other is not None:
        np.testing.assert_array_equal(streams(other), before)


def write(path, name, more):
    shutil.copytree(FIXTURES / name, path, dirs_exist_ok=True)
    (path / "model.safetensors").chmod(0o644)
    tensors = load_file(path / "model.safetensors") | more
    save_file(tensors, path / "model.safetensors")


def test_dead_keys_are_ignored_exactly_where_layers_share(tmp_path):
    """The release has them in layers 3 to 5; anywhere else a surplus tensor is an error."""
    tensors = load_file(FIXTURES / "gemma4_vl" / "model.safetensors")
    at = "model.language_model.layers.{}.self_attn.{}"
    assert all(at.format(i, "k_proj.weight") in tensors for i in (3, 4, 5))
    target, _ = targets.load(FIXTURES / "gemma4_vl")
    assert "model.layers.3.self_attn.k_proj.*" in target.ignored
    assert not any(".layers.2." in pattern for pattern in target.ignored)
    for stray in (at.format(2, "k_proj.bias"), at.format(3, "q_proj.bias")):
        write(tmp_path, "gemma4_vl", {stray: np.zeros(3, np.float32)})
        with pytest.raises(CheckpointError, match=stray.replace("language_model.", "")):
            targets.load(tmp_path)


def test_a_surplus_value_projection_is_refused(tmp_path):
    """Full layers that take keys for values have no v_proj."""
    stray = "model.layers.2.self_attn.v_proj.weight"
    write(tmp_path, "gemma4_moe", {stray: np.zeros((16, 32), np.float32)})
    with pytest.raises(CheckpointError, match=f"surplus {stray}"):
        targets.load(tmp_path)


def test_both_spellings_of_the_sizes_of_full_layers():
    """Without `attention_k_eq_v` the global key-value heads mean nothing."""
    new = {k: v for k, v in LARGE.items() if not k.startswith(("global_", "num_global"))}
    sizes = {"head_dim": 8, "num_key_value_heads": 1}
    for config, layer in ((LARGE, sizes), (LARGE | {"attention_k_eq_v": False}, {"head_dim": 8})):
        spelt = config | {name: None for name in LARGE if name not in new}
        spelt["per_layer_config"] = {"4": layer}
        one, two = targets.from_config(config), targets.from_config(spelt)
        assert one == two and hash(one) == hash(two)
    full = targets.from_config(LARGE).config.kinds[4].attention
    assert (full.kv_heads, full.head_dim, full.value_is_key) == (1, 8, True)
    full = targets.from_config(LARGE | {"attention_k_eq_v": False}).config.kinds[4].attention
    assert (full.kv_heads, full.head_dim, full.value_is_key) == (2, 8, False)
    alike = LARGE | {"per_layer_config": {}}  # what transformers writes if no layer differs
    assert targets.from_config(alike).config.kinds[4].attention.head_dim == 6


def test_a_wrapper_is_its_text_model():
    text = {k: v for k, v in LARGE.items() if k != "eos_token_id"}
    for kind in ("gemma4", "gemma4_unified"):
        inner = text | {"model_type": f"{kind}_text"}
        outer = {"model_type": kind, "text_config": inner, "eos_token_id": [1, 106]}
        target = targets.from_config(outer)
        assert target == targets.from_config(LARGE | {"model_type": f"{kind}_text"})
        assert target.info.stop_ids == (1, 106) and target.config.tied


def test_tensors_are_those_of_the_release():
    shapes = {
        part.hf: part.shape
        for _, spec in leaves_with_names(targets.from_config(SMALL).specs())
        for part in spec.published()
    }
    assert shapes["model.embed_tokens_per_layer.weight"] == (VOCAB, 7 * 4)
    assert shapes["model.per_layer_model_projection.weight"] == (7 * 4, 24)
    assert shapes["model.layers.6.per_layer_input_gate.weight"] == (4, 24)
    assert shapes["model.layers.6.layer_scalar"] == (1,)
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == (2 * 8, 24)
    assert "lm_head.weight" not in shapes


def test_keys_for_values_are_taken_before_norm_and_rope():
    """The value of the first full layer, in float64 from the raw projection."""
    target, params = build("large")
    weights, tokens = params.layers[4], some_tokens(1, 4)
    _, _, update, streams = run(target, params, tokens)
    x = np.asarray(streams[4][0], np.float64)
    rms = lambda v: v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-6)  # noqa: E731
    raw = rms(x) * np.asarray(weights.input_norm) @ np.asarray(weights.attention.k, np.float64).T
    np.testing.assert_allclose(update[4][1][0, 0], rms(raw), atol=1e-5)


def test_scales_are_rounded_to_the_dtype_of_the_weights_f13():
    """F13: what a head borrows comes scaled and capped as in the target."""
    target, params = build("small")
    ids = jnp.arange(VOCAB)
    scale = np.sqrt(np.float32(24))
    np.testing.assert_array_equal(target.embed(params, ids), np.asarray(params.embedding) * scale)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    rounded = np.float32(jnp.bfloat16(24**0.5))
    assert rounded != scale
    want = (np.asarray(half.embedding, np.float32) * rounded).astype(jnp.bfloat16)
    np.testing.assert_array_equal(target.embed(half, ids), want)
    assert np.abs(target.logits(params, 1e3 * params.embedding)).max() <= 5.0
    raw = target.logits(params, 1e-3 * params.embedding)
    exact = 1e-3 * np.asarray(params.embedding, np.float64) @ np.asarray(params.embedding).T
    np.testing.assert_allclose(raw, 5 * np.tanh(exact / 5), atol=1e-6)


def test_draft_heads_get_the_sizes_of_sliding_layers_f14():
    """F14: published EAGLE-3 heads have them; width over heads would be another head size."""
    block = targets.from_config(SMALL).info.draft_block
    assert (block.hidden, block.heads, block.kv_heads, block.head_dim) == (24, 4, 2, 6)
    assert (block.mlp, block.rope.theta, block.rope.dims) == (28, 100.0, 6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ({"layer_types": [KINDS["S"]] * 5}, "last of layer_types must be 'full_attention'"),
        ({"layer_types": [KINDS["F"]]}, "1 layer_types for 5 layers"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer type 'chunked_attention'"),
        ({"global_head_dim": None}, "lacks global_head_dim"),
        ({"sliding_window": None}, "lacks sliding_window"),
        ({"rope_parameters": {KINDS["S"]: ROPES[KINDS["S"]]}}, "rope_parameters lack 'full_att"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters lack 'sliding_attention'"),
        ({"num_key_value_heads": 3}, "4 heads of layer 0 do not divide over 3"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "layer 1 sets sliding_window"),
        ({"num_kv_shared_layers": 5}, "layer 0 shares keys and values, but no sliding layer"),
        (
            {"num_kv_shared_layers": 2, "layer_types": [KINDS[x] for x in "SSFSF"],
             "per_layer_config": {"2": {"head_dim": 8}}},
            "layer 4 shares keys and values of other sizes",
        ),
        ({"enable_moe_block": True, "num_experts": 4}, "lacks top_k_experts, moe_interm"),
        ({"hidden_size_per_layer_input": 4}, "lacks vocab_size_per_layer_input"),
        (
            {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 60},
            "vocab_size_per_layer_input 60 is below vocab_size 61",
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_do_is_refused_by_name(changes, says):
    with pytest.raises(CheckpointError, match=says):
        targets.from_config(LARGE | changes)
