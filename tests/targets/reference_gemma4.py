"""Random Gemma 4 configurations, and transformers' answers to them in float64."""

import json

import numpy as np

from .reference import LENGTH

PATTERNS = ("SSFSSF", "SFSSF", "SSSF", "FSSFSF", "SFF", "FF")
KINDS = {"S": "sliding_attention", "F": "full_attention"}


def random_config(seed):
    """A small configuration; twelve seeds go through every feature, on and off.

    Returns:
        (fields, whether it is the unified class, which has neither experts nor own inputs).
    """
    rng = np.random.default_rng(seed)
    types = [KINDS[letter] for letter in PATTERNS[seed % len(PATTERNS)]]
    kv_heads, full_kv_heads = (int(n) for n in rng.integers(1, 4, 2))
    vocab = int(rng.integers(60, 131))
    config = {
        "vocab_size": vocab,
        "hidden_size": int(rng.integers(9, 25)),
        "intermediate_size": int(rng.integers(20, 50)),
        "num_hidden_layers": len(types),
        "layer_types": types,
        "num_attention_heads": kv_heads * full_kv_heads * int(rng.integers(1, 3)),
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full_kv_heads,
        "head_dim": 2 * int(rng.integers(3, 7)),
        "global_head_dim": 2 * int(rng.integers(5, 10)),
        "attention_k_eq_v": seed % 2 == 0,
        "attention_bias": seed % 3 == 0,
        "sliding_window": int(rng.integers(2, 8)),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 1e-3])),
        "tie_word_embeddings": seed % 4 != 3,
        "final_logit_softcapping": (None, 5.0, 30.0)[seed % 3],
        "use_bidirectional_attention": (None, "vision")[seed % 2],
        "max_position_embeddings": 512,
        "rope_parameters": {
            KINDS["S"]: {"rope_type": "default", "rope_theta": float(rng.choice([100.0, 1e4]))},
            KINDS["F"]: {
                "rope_type": "proportional",
                "rope_theta": float(rng.choice([1e3, 1e6])),
                "partial_rotary_factor": float(rng.choice([0.25, 0.5, 1.0])),
            },
        },
    }
    if seed % 5 in (1, 2, 3):  # the last layers share, all that can
        owned = max(types.index(kind) for kind in set(types)) + 1
        config["num_kv_shared_layers"] = len(types) - owned
        config["use_double_wide_mlp"] = seed % 5 != 2
    if unified := seed % 6 == 4:
        return config, unified
    config["hidden_size_per_layer_input"] = int(rng.integers(3, 9)) if seed % 4 in (1, 2) else 0
    config["vocab_size_per_layer_input"] = vocab + int(rng.integers(0, 4))
    if seed % 3 != 1:
        experts = int(rng.integers(3, 10))
        config |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": int(rng.integers(1, experts)),
            "moe_intermediate_size": int(rng.integers(5, 20)),
        }
    return config, unified


def write_checkpoint(seed, path, norm_weight=None):
    """Write a random checkpoint of transformers and return (ids, logits, hidden states).

    The hidden states are `[L + 1, B, T, H]`, the last one before the final norm. Odd seeds spell
    the sizes of full layers as releases do. `norm_weight` is what all norms get, None for values
    around 1.
    """
    import torch
    import transformers

    fields, unified = random_config(seed)
    name = "Gemma4Unified" if unified else "Gemma4"
    config = getattr(transformers, f"{name}TextConfig")(**fields)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        weights = [*model.named_parameters(), *model.named_buffers()]
        for where, weight in weights:
            if where.endswith(".bias"):
                weight.normal_(0, 0.3)
            elif where.endswith(("norm.weight", "norm_1.weight", "norm_2.weight")) and norm_weight:
                weight.fill_(norm_weight)
            elif where.endswith("layer_scalar") or (weight.ndim == 1 and "inv_freq" not in where):
                weight.normal_(1, 0.2)
            elif weight.ndim > 1:
                weight.normal_(0, 0.3)
    model.save_pretrained(path)
    if seed % 2:
        respell(path / "config.json", fields)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (2, LENGTH))
    last = {}
    model.double().model.norm.register_forward_pre_hook(lambda _, inputs: last.update(x=inputs[0]))
    with torch.no_grad():
        out = model(torch.as_tensor(ids), output_hidden_states=True)
    states = [*out.hidden_states[:-1], last["x"]]
    return ids.astype(np.int32), out.logits.numpy(), np.stack([s.numpy() for s in states])


def respell(file, fields):
    """Write the sizes of full layers as releases do."""
    config = json.loads(file.read_text())
    del config["per_layer_config"]
    for name in ("global_head_dim", "num_global_key_value_heads"):
        config[name] = fields[name]
    file.write_text(json.dumps(config))
