"""Qwen3.5: fixtures, live parity with transformers, and states that rejected drafts never touch."""

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
from specjax.core.stack import ungroup
from specjax.decode import Engine, EngineConfig, Request
from specjax.decode import engine as engine_module
from specjax.layers.norm import offset_norm
from specjax.targets import TargetConfig
from tests.decode.scripted import ScriptedHead

from .parity import FIXTURES, check_tap_map, tapped
from .reference_qwen3_5 import write_checkpoint

NAMES = ("qwen3_5_vl_mtp", "qwen3_5_moe")  # a release, and a text-only save with experts
VOCAB = 97
DENSE = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SPARSE = {name: value for name, value in DENSE.items() if name != "intermediate_size"} | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}


@pytest.mark.parametrize("name", NAMES)
def test_fixture_and_tap_map_f5(name):
    check_tap_map(name)


@pytest.mark.parametrize("loop", ["scan", pytest.param("unroll", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_fixture_in_both_layer_loops(name, loop):
    target, params, want = load_fixture(name, loop)
    got = full_pass(target, params, want["input_ids"])
    got["chunk_logits"] = chunked(target, params, want["input_ids"], 16)
    for tensor, value in got.items():
        np.testing.assert_allclose(value, want[tensor], atol=1e-4, err_msg=tensor)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["scan", "unroll"])
@pytest.mark.parametrize("name", NAMES)
def test_fixture_padded_and_decoded(name, loop):
    target, params, want = load_fixture(name, loop)
    mask = want["attention_mask"] != 0
    got = padded(target, params, want["padded_input_ids"], mask)
    np.testing.assert_allclose(
        got["padded_logits"], np.where(mask[..., None], want["padded_logits"], 0), atol=1e-4
    )
    got = greedy(target, params, want["greedy_prompt"], want["greedy_ids"].shape[1])
    np.testing.assert_array_equal(got["greedy_ids"], want["greedy_ids"])
    np.testing.assert_allclose(got["greedy_logits"], want["greedy_logits"], atol=1e-4)


def load_fixture(name, loop):
    target, params = targets.load(FIXTURES / name, how=TargetConfig(layer_loop=loop))
    want = load_file(FIXTURES / name / "expected.safetensors")
    ids = ("input_ids", "padded_input_ids", "greedy_prompt")
    return target, params, want | {name: want[name].astype(np.int32) for name in ids}


@pytest.mark.torch
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 13))]
)
def test_live_parity_on_random_configurations(sparse, seed, tmp_path):
    pytest.importorskip("torch")
    ids, logits, states = write_checkpoint(sparse, seed, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert ("rope_parameters" in fields) == (seed % 2 == 0)
    for loop in ("unroll", "scan"):
        target, params = targets.load(tmp_path, how=TargetConfig(layer_loop=loop))
        got_logits, got_states, _ = tapped(target, params, ids)
        for got, want in ((got_states, states), (got_logits, logits)):
            scale = max(1.0, np.abs(want).max())
            np.testing.assert_allclose(got, want, atol=1e-4 * scale)


LENGTHS, BUDGETS, WIDTH = (9, 1, 40, 17, 3), (20, 13, 6, 21, 16), 64
LOOPED = [(DENSE, "unroll"), (SPARSE, "unroll"), (DENSE | {"num_hidden_layers": 8}, "scan")]


def build(config, loop="unroll"):
    """(target, weights): norms off their start, heads that remember for dozens of tokens."""
    target = targets.from_config(config, TargetConfig(layer_loop=loop))
    rng = np.random.default_rng(7)

    def draw(spec):
        start = -3.0 if spec.hf.endswith("A_log") else float(spec.init == "ones")
        return jnp.asarray(rng.normal(start, 0.2, spec.shape), jnp.float32)

    return target, map_specs(draw, target.specs())


@functools.partial(jax.jit, static_argnums=0)
def prefill(target, params, tokens, valid):
    """(logits, the cache) of right-padded rows; nothing came before them."""
    cache = target.init_cache(*tokens.shape, dtype=params.embedding.dtype.name)
    out = target.forward(params, tokens, valid, cache)
    return target.logits(params, out.hidden), target.commit(cache, out.update, valid)


def padded_rows(rows, fill=0):
    tokens = np.full((len(rows), WIDTH), fill, np.int32)
    for to, row in zip(tokens, rows, strict=True):
        to[: len(row)] = row
    return tokens, np.asarray([len(row) for row in rows], np.int32)


def some_prompts():
    """Five prompts, told apart by their first token."""
    rng = np.random.default_rng(1)
    return [(i, *map(int, rng.integers(20, VOCAB, n - 1))) for i, n in enumerate(LENGTHS)]


def plain_answers(target, params, prompts):
    """Decode as plainly as can be: a whole pass for every token."""
    rows = list(prompts)
    for _ in range(max(BUDGETS)):
        tokens, valid = padded_rows(rows)
        best = np.asarray(prefill(target, params, tokens, valid)[0]).argmax(-1)
        rows = [(*row, int(best[b, len(row) - 1])) for b, row in enumerate(rows)]
    return [
        row[len(prompt) :][:budget]
        for row, prompt, budget in zip(rows, prompts, BUDGETS, strict=True)
    ]


def decode(target, params, prompts, answers, wrong, monkeypatch):
    """Decode in two lanes with scripted drafts; (results, each request's cache at its end).

    Prompts are padded to buckets of 16, the longest takes three chunks, and lanes are refilled.
    `wrong(i, j)` says whether the draft for token j of answer i is spoilt.
    """
    script = np.full((len(LENGTHS), 128), VOCAB - 1, np.int32)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        drafts = [(t + wrong(i, j)) % VOCAB for j, t in enumerate(answer)]
        script[i, : len(prompt) + len(answer)] = (*prompt, *drafts)
    found, collect = {}, engine_module._Run._collect

    def watched(run, state):
        done = np.asarray(state.done)
        layers = ungroup(state.cache.layers, target.config.segments)
        for lane, index in enumerate(run.lane_request):
            if index is not None and done[lane]:
                rows = jax.tree.map(lambda leaf, lane=lane: np.asarray(leaf[lane]), layers)
                found[index] = (int(state.cache.lengths[lane]), rows)
        collect(run, state)

    monkeypatch.setattr(engine_module._Run, "_collect", watched)
    settings = EngineConfig(num_speculative_tokens=4, concurrency=2, capacity=128, prefill_chunk=16)
    head = ScriptedHead(spoil=0, vocab=VOCAB)
    engine = Engine(target, params, head, jnp.asarray(script), settings, stop_ids=())
    requests = [Request(p, len(a)) for p, a in zip(prompts, answers, strict=True)]
    return engine.generate(requests), found


def check_fresh(target, params, texts, found):
    """The caches that decoding left are those of a prefill (the last token is not in either)."""
    tokens, valid = padded_rows([text[:-1] for text in texts])
    _, cache = prefill(target, params, tokens, valid)
    fresh = ungroup(cache.layers, target.config.segments)
    for b, n in enumerate(map(int, valid)):
        length, layers = found[b]
        assert length == n
        for name, got, entry in zip(target.info.layer_kinds, layers, fresh, strict=True):
            want = jax.tree.map(lambda leaf, b=b: np.asarray(leaf[b]), entry)
            if name == "recurrent":
                assert np.abs(want.state).max() > 0.1
                np.testing.assert_allclose(got.state, want.state, atol=1e-5)
                close(got.tail, want.tail)
                continue
            for left, right in ((got.k, want.k), (got.v, want.v)):
                close(left[:, :n], right[:, :n])
                assert not left[:, n:].any()  # nothing rejected was ever written


def close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize(("config", "loop"), LOOPED, ids=["dense", "sparse", "scanned"])
def test_rejected_drafts_leave_the_state_alone_f52(config, loop, monkeypatch):
    """F52: drafts rejected at slot 2 of 4; text and acceptance are true, the states are fresh.

    A round emits two tokens then, the first of which was drafted well.
    """
    target, params = build(config, loop)
    prompts = some_prompts()
    answers = plain_answers(target, params, prompts)
    assert all(len(set(answer)) > 4 for answer in answers)
    results, found = decode(target, params, prompts, answers, lambda i, j: j % 2 == 0, monkeypatch)
    assert [r.token_ids for r in results] == answers
    # The first token comes with the prompt; the last round of 20 has no room for a draft.
    assert (results[0].rounds, results[0].accepted) == (10, (9, 0, 0, 0))
    assert all(r.accepted[1:] == (0, 0, 0) for r in results)
    check_fresh(target, params, [p + a for p, a in zip(prompts, answers, strict=True)], found)


@pytest.mark.parametrize(("config", "loop"), LOOPED[:2], ids=["dense", "sparse"])
def test_padded_prompts_and_refilled_lanes_leave_no_trace(config, loop, monkeypatch):
    """Two lanes, five prompts of other lengths, drafts spoilt at random: as one at a time."""
    target, params = build(config, loop)
    prompts = some_prompts()
    answers = plain_answers(target, params, prompts)
    spoilt = np.random.default_rng(3).random((5, 128)) < 0.3
    results, found = decode(
        target, params, prompts, answers, lambda i, j: spoilt[i, j], monkeypatch
    )
    assert [r.token_ids for r in results] == answers
    assert np.sum([r.accepted for r in results], 0).min() > 0  # rejected at any slot
    check_fresh(target, params, [p + a for p, a in zip(prompts, answers, strict=True)], found)


@pytest.mark.parametrize(("config", "loop"), LOOPED, ids=["dense", "sparse", "scanned"])
def test_what_stands_at_pads_does_not_matter(config, loop):
    target, params = build(config, loop)
    rows = some_prompts()
    (one, left), (two, right) = (
        prefill(target, params, *padded_rows(rows, fill)) for fill in (0, VOCAB - 1)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), left, right)
    for b, row in enumerate(rows):
        np.testing.assert_allclose(one[b, : len(row)], two[b, : len(row)], atol=1e-5)


def test_norms_keep_small_offsets_in_bfloat16():
    """1 + 0.003 is 1 in bfloat16; the published models multiply in float32."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 64)).astype(jnp.bfloat16)
    offset = np.full(64, 0.003, jnp.bfloat16)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    exact *= 1 + offset.astype(np.float64)
    got = np.asarray(offset_norm(jnp.asarray(x), jnp.asarray(offset), 1e-6))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(np.float32).astype(jnp.bfloat16))


def test_bfloat16_keeps_its_dtype_and_its_states_in_float32():
    target, params = build(DENSE)
    rows = padded_rows(some_prompts())
    exact, _ = prefill(target, params, *rows)
    half = map_specs(
        lambda spec, w: w if spec.dtype else w.astype(jnp.bfloat16), target.specs(), params
    )
    logits, cache = prefill(target, half, *rows)
    assert cache.layers[0].tail.dtype == cache.layers[3].k.dtype == jnp.bfloat16
    assert cache.layers[0].state.dtype == logits.dtype == jnp.float32
    real = np.arange(WIDTH) < rows[1][:, None]
    # Small networks amplify rounding; transformers' own differ as much between the two dtypes.
    assert np.abs(logits - exact)[real].mean() < 0.03 * np.abs(exact)[real].max()


def test_layers_and_tensors_are_those_of_the_release():
    target = targets.from_config(SPARSE)
    assert target.info.layer_kinds == ("recurrent",) * 3 + ("full",)
    shapes = {
        part.hf: part.shape for _, spec in leaves_with_names(target.specs())
        for part in spec.published()
    }  # fmt: skip
    at = "model.layers.3."
    assert shapes[f"{at}self_attn.q_proj.weight"] == (2 * 4 * 16, 32)  # queries and gates
    assert shapes[f"{at}self_attn.k_norm.weight"] == (16,)
    assert shapes[f"{at}mlp.shared_expert_gate.weight"] == (1, 32)
    assert shapes[f"{at}mlp.shared_expert.down_proj.weight"] == (32, 20)
    assert shapes[f"{at}mlp.experts.5.gate_proj.weight"] == (12, 32)
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (2 * 2 * 8 + 4 * 12, 1, 4)
    assert not any("self_attn" in name and ".3." not in name for name in shapes)


def test_a_wrapper_with_stacked_experts_is_the_same_model(tmp_path):
    """Releases: text under `model.language_model.`, the experts of a layer in two tensors."""
    plain = load_file(FIXTURES / "qwen3_5_moe" / "model.safetensors")
    config = json.loads((FIXTURES / "qwen3_5_moe" / "config.json").read_text())
    wrapped = {}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp.experts."
        e = range(config["num_experts"])
        gate, up, down = (
            np.stack([plain.pop(f"{at}{n}.{name}_proj.weight") for n in e])
            for name in ("gate", "up", "down")
        )
        plain[f"{at}gate_up_proj"], plain[f"{at}down_proj"] = np.concatenate([gate, up], 1), down
    for name, value in plain.items():
        wrapped[name.replace("model.", "model.language_model.", 1)] = value
    wrapped["mtp.fc.weight"] = np.zeros((3, 3), np.float32)
    wrapped["model.visual.patch_embed.proj.weight"] = np.zeros((3, 3), np.float32)
    save_file(wrapped, tmp_path / "model.safetensors")
    outer = {"model_type": "qwen3_5_moe", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    one, two = targets.load(FIXTURES / "qwen3_5_moe"), targets.load(tmp_path)
    assert one[0] == two[0] and hash(one[0]) == hash(two[0])
    jax.tree.map(np.testing.assert_array_equal, one[1], two[1])


def test_only_the_drafting_module_may_be_surplus(tmp_path):
    shutil.copytree(FIXTURES / "qwen3_5_moe", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    stray = "model.layers.0.self_attn.q_proj.weight"  # layer 0 is linear
    save_file(tensors | {stray: np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"surplus {stray}"):
        targets.load(tmp_path)


def test_both_spellings_of_layer_types_and_rope():
    listed = DENSE | {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]),
        "full_attention_interval": 2,  # the list says more
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "rope_type": "default"},
    }  # fmt: skip
    spelt = DENSE | {
        "full_attention_interval": 4, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    }  # fmt: skip
    assert targets.from_config(listed) == targets.from_config(spelt)
    by_two = targets.from_config(DENSE | {"full_attention_interval": 2})
    assert by_two.info.layer_kinds == ("recurrent", "full") * 2


def test_a_quarter_of_the_dims_turns_unless_told_otherwise_f10():
    """F10: heads built for the target turn the same dims."""
    target = targets.from_config(DENSE | {"head_dim": 256})
    rope = target.config.kinds[3].mixer.rope
    assert rope.dims == target.info.draft_block.rope.dims == 64
    assert targets.from_config(SPARSE).info.draft_block.mlp == 3 * 32
    assert targets.from_config(DENSE).info.draft_block.mlp == 40


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attn_output_gate": False}, "attn_output_gate False"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention'"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3"),
        ({"linear_key_head_dim": None}, "lacks linear_key_head_dim"),
        ({"num_experts": None, "moe_intermediate_size": None}, "lacks num_experts, moe_interm"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(changes, says):
    with pytest.raises(CheckpointError, match=says):
        targets.from_config(SPARSE | changes)
