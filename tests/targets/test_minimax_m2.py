"""MiniMax-M2: fixture, live parity with transformers, taps of just the layers named, refusals."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import targets
from specjax.core.errors import CheckpointError, PairingError
from specjax.core.params import map_specs
from specjax.heads.eagle3.layouts import read_head
from specjax.targets import TargetConfig

from .parity import FIXTURES, check_tap_map
from .reference_sparse import check_live, check_padded_and_decoded, check_passes

NAME = "minimax_m2"
CONFIG = {
    "model_type": "minimax_m2",
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}


def test_fixture_and_tap_map_f5():
    check_tap_map(NAME)


@pytest.mark.parametrize("loop", ["scan", pytest.param("unroll", marks=pytest.mark.slow)])
def test_fixture_in_both_layer_loops(loop):
    check_passes(NAME, loop)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_fixture_padded_and_decoded(loop):
    check_padded_and_decoded(NAME, loop)


@pytest.mark.torch
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (0, *range(2, 13)))]
)
def test_live_parity_on_random_configurations(seed, tmp_path):
    pytest.importorskip("torch")
    check_live("minimax_m2", seed, tmp_path)


def staircase(loop):
    """(target, weights) whose k-th layer, counted from 1, adds 10 k to every dim of its stream.

    Embeddings are all 1, so every stream is constant over dims and its norm is 1; attention adds
    nothing, and all experts answer `silu(1) * 1 * down` in each of their I dims.
    """
    target = targets.from_config(CONFIG, TargetConfig(layer_loop=loop))
    hidden, width = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    answer = width / (1 + np.exp(-1.0))

    def fill(spec):
        """Fill each layer's tensor by its published name."""
        if spec.parts:
            return jnp.stack([fill(part) for part in spec.parts])
        name, value = spec.hf, 0.0
        if "norm" in name or "embed_tokens" in name:
            value = 1.0
        elif ".w1." in name or ".w3." in name:
            value = 1 / hidden
        elif ".w2." in name:
            value = 10 * (int(name.split(".")[2]) + 1) / answer
        return jnp.full(spec.shape, value, jnp.float32)

    return target, map_specs(fill, target.specs())


def head_config(ids):
    block = {"hidden_size": 24, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 72}
    return block | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": 33,
        "eagle_aux_hidden_state_layer_ids": ids,
    }


@pytest.mark.parametrize("loop", ["unroll", "scan"])
@pytest.mark.parametrize("ids", [(1, 2, 3), pytest.param((0, 4, 5), marks=pytest.mark.slow)])
def test_taps_are_exactly_the_layers_that_the_head_names_f2(loop, ids):
    """F2: a tap one layer early costs most of the acceptance, and nothing else shows it.

    Id k is the stream after k layers: 1 + 10 (1 + ... + k).
    """
    target, params = staircase(loop)
    head = read_head(head_config(ids), {}, target.info)
    assert head.config.taps == ids
    tokens = jnp.asarray([[3, 1, 4, 1]])
    run = jax.jit(lambda p, t: target.forward(p, t, taps=head.config.taps).taps)
    got = run(params, tokens)
    after = 1 + 10 * np.asarray([sum(range(k + 1)) for k in ids])
    assert len(set(after)) == 3
    want = np.broadcast_to(after[:, None, None, None], got.shape)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_a_head_cannot_tap_beyond_the_last_layer():
    info = targets.from_config(CONFIG).info
    with pytest.raises(PairingError, match=r"taps layers \[1, 2, 6\]; .* streams 0\.\.5"):
        read_head(head_config([1, 2, 6]), {}, info)


def test_norms_span_whole_projections_and_heads_are_ordinary():
    target = targets.from_config(CONFIG)
    attention = target.specs().layers[0].attention
    assert (attention.q_norm.shape, attention.k_norm.shape) == ((4 * 8,), (2 * 8,))
    plain = targets.from_config(CONFIG | {"use_qk_norm": False}).specs().layers[0].attention
    assert plain.q_norm is None and plain.k_norm is None
    draft = target.info.draft_block
    assert (draft.mlp, draft.qk_norm, draft.whole_norm) == (3 * 24, False, False)


def test_three_spellings_of_the_turning_dims():
    """`rotary_dim` is what releases say, the other two are transformers' spellings."""
    spelt = [
        {"rotary_dim": 4, "rope_theta": 5e6},
        {"partial_rotary_factor": 0.5, "rope_theta": 5e6},
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5e6}},
    ]
    one, two, three = (targets.from_config(CONFIG | rope) for rope in spelt)
    assert one == two == three
    assert one.config.kinds[0].block.rope.dims == one.info.draft_block.rope.dims == 4


def test_what_releases_state_besides_changes_nothing():
    """MiniMax-M2's own configuration: full attention named per layer, MTP declared but unpublished.

    A shared expert of width 0 is none.
    """
    stated = CONFIG | {
        "attn_type_list": [1] * 5,
        "shared_intermediate_size": 0,
        "scoring_func": "sigmoid",
        "qk_norm_type": "per_layer",
        "use_qk_norm": True,
        "use_routing_bias": True,
        "use_mtp": True,
        "num_mtp_modules": 3,
    }
    assert targets.from_config(stated) == targets.from_config(CONFIG)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attn_type_list": [1, 0, 1, 1, 1]}, "attn_type_list has linear layers"),
        ({"shared_intermediate_size": 16}, "a shared expert is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'; minimax_m2 has 'sigmoid'"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
        ({"use_routing_bias": False}, "use_routing_bias False"),
        ({"num_local_experts": None}, "lacks num_local_experts"),
        ({"num_local_experts": 1}, "top_k 2 of 1 experts"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "4 heads do not divide over 3"),
        ({"model_type": "minimax_m1"}, "'minimax_m1' is not supported; have .*minimax_m2"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(changes, says):
    with pytest.raises(CheckpointError, match=says) as refused:
        targets.from_config(CONFIG | changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("intermediate_size", 16, r"experts\.0\.w1\.weight has shape \(12, 32\), the config"),
        ("num_local_experts", 9, r"missing model\.layers\.0\.block_sparse_moe\.experts\.8\.w1\."),
        ("head_dim", 8, r"k_norm\.weight has shape \(32,\), the configuration asks for \(16,\)"),
        ("num_hidden_layers", 3, r"surplus model\.layers\.3\.block_sparse_moe\.e_score_corr"),
    ],
)
def test_a_configuration_that_contradicts_the_tensors(tmp_path, field, value, says):
    shutil.copytree(FIXTURES / NAME, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=says) as refused:
        targets.load(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_missing_expert_is_named(tmp_path):
    shutil.copytree(FIXTURES / NAME, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if ".layers.2.block_sparse_moe.e" not in name}
    experts = [name for name in tensors if ".layers.2.block_sparse_moe.experts." in name]
    assert len(tensors) - len(kept) == len(experts) + 1 == 3 * 8 + 1  # and the correction
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="25 tensors do not fit") as refused:
        targets.load(tmp_path)
    assert all(f"missing {name} (" in str(refused.value) for name in experts)
