"""What the tests of Qwen3-MoE, DeepSeek-V3 and MiniMax-M2 share: fixtures and random checkpoints.

`random_config` and `write_checkpoint` ask transformers for its answers; the `check_` functions
compare ours with those, or with the ones that the fixtures store.
"""

import json

import numpy as np
from safetensors.numpy import load_file

from scripts.fixture_checks.targets import chunked, full_pass, greedy, padded
from specjax import targets
from specjax.targets import TargetConfig

from .parity import FIXTURES, tapped
from .reference import LENGTH, random_rope

CLASSES = {"qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3", "minimax_m2": "MiniMaxM2"}


def load_fixture(name, loop):
    """Return (target, weights, stored tensors); ids are int32."""
    target, params = targets.load(FIXTURES / name, how=TargetConfig(layer_loop=loop))
    want = load_file(FIXTURES / name / "expected.safetensors")
    ids = ("input_ids", "padded_input_ids", "greedy_prompt")
    return target, params, want | {name: want[name].astype(np.int32) for name in ids}


def check_passes(name, loop):
    """A whole pass, and one in two chunks with a cache between them."""
    target, params, want = load_fixture(name, loop)
    got = full_pass(target, params, want["input_ids"])
    got["chunk_logits"] = chunked(target, params, want["input_ids"], 16)
    for tensor, value in got.items():
        np.testing.assert_allclose(value, want[tensor], atol=1e-4, err_msg=tensor)


def check_padded_and_decoded(name, loop):
    """Padded rows, and greedy decoding by the engine."""
    target, params, want = load_fixture(name, loop)
    mask = want["attention_mask"] != 0
    got = padded(target, params, want["padded_input_ids"], mask)
    np.testing.assert_allclose(
        got["padded_logits"], np.where(mask[..., None], want["padded_logits"], 0), atol=1e-4
    )
    got = greedy(target, params, want["greedy_prompt"], want["greedy_ids"].shape[1])
    np.testing.assert_array_equal(got["greedy_ids"], want["greedy_ids"])
    np.testing.assert_allclose(got["greedy_logits"], want["greedy_logits"], atol=1e-4)


def random_config(family, seed):
    """A small configuration; over a dozen consecutive seeds every feature is on and off."""
    rng = np.random.default_rng(seed)
    config = {
        "vocab_size": int(rng.integers(60, 131)),
        "hidden_size": int(rng.integers(9, 25)),
        "intermediate_size": int(rng.integers(10, 30)),
        "num_hidden_layers": int(rng.integers(2, 5)),
        "max_position_embeddings": 512,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 1e-3])),
        "tie_word_embeddings": seed % 2 == 0,
        "initializer_range": 0.3,
    }
    more = {"qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek_v3, "minimax_m2": _minimax_m2}
    return config | more[family](rng, seed)


def _heads(rng):
    kv_heads = int(rng.integers(1, 4))
    return {
        "num_attention_heads": kv_heads * int(rng.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "head_dim": int(rng.choice([8, 16, 24])),
    }


def _qwen3_moe(rng, seed):
    experts = int(rng.integers(3, 10))
    return _heads(rng) | {
        "rope_parameters": random_rope(rng, seed),
        "attention_bias": seed % 3 == 0,
        "num_experts": experts,
        "num_experts_per_tok": int(rng.integers(1, experts + 1)),
        "moe_intermediate_size": int(rng.integers(5, 20)),
        "norm_topk_prob": seed % 4 < 2,
        "num_hidden_layers": 4,
        "decoder_sparse_step": (1, 2, 1, 3, 1)[seed % 5],
        "mlp_only_layers": ([1], [], [0, 3], [])[seed % 4],
    }


def _minimax_m2(rng, seed):
    experts = int(rng.integers(3, 10))
    return _heads(rng) | {
        "rope_parameters": {
            **random_rope(rng, seed),
            "partial_rotary_factor": (0.5, 0.25, 1.0)[seed % 3],
        },
        "num_local_experts": experts,
        "num_experts_per_tok": int(rng.integers(1, experts + 1)),
    }


def _deepseek_v3(rng, seed):
    groups = (4, 1, 3)[seed % 3]
    size = int(rng.integers(2, 5))
    kept = int(rng.integers(1, groups + 1))
    heads = int(rng.integers(1, 6))
    yarn = {
        "rope_type": "yarn",
        "factor": float(rng.uniform(2, 40)),
        "original_max_position_embeddings": int(rng.integers(16, 64)),
    }
    scalings = [
        {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"rope_type": "default"},
        {**yarn, "beta_fast": 8.0},
        {**yarn, "mscale": 1.0, "mscale_all_dim": 0.7},
    ]
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rope_parameters": {
            "rope_theta": float(rng.choice([50.0, 1e4])),
            **scalings[seed % 4],
        },
        "q_lora_rank": None if seed % 5 == 1 else int(rng.integers(4, 13)),
        "kv_lora_rank": int(rng.integers(4, 13)),
        "qk_nope_head_dim": int(rng.integers(3, 13)),
        "qk_rope_head_dim": 2 * int(rng.integers(2, 6)),
        "v_head_dim": int(rng.integers(3, 13)),
        "rope_interleave": seed % 5 != 3,
        "attention_bias": seed % 2 == 0,
        "first_k_dense_replace": int(rng.integers(0, 3)),
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": int(rng.integers(1, kept * size + 1)),
        "norm_topk_prob": seed % 3 != 1,
        "routed_scaling_factor": float(rng.uniform(0.5, 3)),
        "n_shared_experts": 1 + seed % 2,
        "moe_intermediate_size": int(rng.integers(5, 20)),
        "num_nextn_predict_layers": 0,
    }


def write_checkpoint(family, seed, path):
    """Write a random checkpoint of transformers and return (ids, logits, hidden states).

    The hidden states are `[L + 1, B, T, H]`, the last one before the final norm. Odd seeds spell
    the rope, and MiniMax's `rotary_dim`, as older configurations do.
    """
    import torch
    import transformers

    config = getattr(transformers, f"{CLASSES[family]}Config")(**random_config(family, seed))
    config._experts_implementation = "eager"  # the default's kernel wants widths of 16 bytes
    torch.manual_seed(seed)
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms start at one and biases at zero, which would hide them
                weight.normal_(float(name.endswith("norm.weight")), 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # negative ones matter to the groups
                buffer.normal_(0, 0.5)
    model.save_pretrained(path)
    if seed % 2:
        _respell(path / "config.json")
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (2, LENGTH))
    last = {}
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.update(x=inputs[0]))
    with torch.no_grad():
        out = model(torch.as_tensor(ids), output_hidden_states=True)
    states = [*out.hidden_states[:-1], last["x"]]
    return ids.astype(np.int32), out.logits.numpy(), np.stack([s.numpy() for s in states])


def _respell(file):
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    if (partial := rope.pop("partial_rotary_factor", None)) is not None:
        fields["rotary_dim"] = int(partial * fields["head_dim"])
    kind = rope.pop("rope_type")
    fields["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    file.write_text(json.dumps(fields))


def check_live(family, seed, path, loops=("unroll", "scan")):
    """Logits and all hidden states of a random configuration agree with transformers."""
    ids, logits, states = write_checkpoint(family, seed, path)
    fields = json.loads((path / "config.json").read_text())
    assert ("rope_parameters" in fields) == (seed % 2 == 0)
    for loop in loops:
        target, params = targets.load(path, how=TargetConfig(layer_loop=loop))
        got_logits, got_states, _ = tapped(target, params, ids)
        for got, want in ((got_states, states), (got_logits, logits)):
            scale = max(1.0, np.abs(want).max())
            np.testing.assert_allclose(got, want, atol=1e-4 * scale)
