"""Small Qwen3.5 configurations, fixed and random, and transformers' answers to the latter."""

import json

import numpy as np

from .reference import LENGTH, random_rope

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
PATTERNS = (None, "LLFLLF", "FLLFLL", "LLL", "LFFL", "FL")  # None: the interval's, two turns
KINDS = {"L": "linear_attention", "F": "full_attention"}


def random_config(sparse, seed):
    """A small configuration; seeds go through patterns, ropes, spellings, biases and ties."""
    rng = np.random.default_rng(seed)
    kv_heads, key_heads = (int(n) for n in rng.integers(1, 4, 2))
    groups, shares = (int(n) for n in rng.integers(1, 4, 2))
    pattern = PATTERNS[seed % len(PATTERNS)]
    config = {
        "vocab_size": int(rng.integers(60, 131)),
        "hidden_size": int(rng.integers(9, 25)),
        "num_hidden_layers": len(pattern or "LLLFLLLF"),
        "layer_types": pattern and [KINDS[letter] for letter in pattern],
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "head_dim": int(rng.choice([8, 16, 24])),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * shares,
        "linear_key_head_dim": int(rng.integers(4, 13)),
        "linear_value_head_dim": int(rng.integers(4, 13)),
        "linear_conv_kernel_dim": int(rng.integers(2, 6)),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 1e-3])),
        "tie_word_embeddings": seed % 2 == 0,
        "attention_bias": seed % 3 == 0,
        "initializer_range": 0.3,
        "rope_parameters": {
            **random_rope(rng, seed),
            "partial_rotary_factor": (0.25, 0.5, 1.0)[seed % 3],
        },
    }
    if not sparse:
        return config | {"intermediate_size": int(rng.integers(20, 70))}
    experts = int(rng.integers(3, 10))
    return config | {
        "num_experts": experts,
        "num_experts_per_tok": int(rng.integers(1, experts)),
        "moe_intermediate_size": int(rng.integers(5, 20)),
        "shared_expert_intermediate_size": int(rng.integers(5, 20)),
    }


def write_checkpoint(sparse, seed, path):
    """Write a random checkpoint of transformers and return (ids, logits, hidden states).

    The hidden states are `[L + 1, B, T, H]`, the last one before the final norm. Odd seeds spell
    rope and layer types as older configurations do.
    """
    import torch
    import transformers

    name = "Qwen3_5Moe" if sparse else "Qwen3_5"
    config = getattr(transformers, f"{name}TextConfig")(**random_config(sparse, seed))
    config._experts_implementation = "eager"  # the default's kernel wants widths of 16 bytes
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for where, weight in model.named_parameters():
            if where.endswith("A_log"):
                weight.uniform_(-4, 1)  # some heads forget at once, some hardly ever
            elif weight.ndim == 1:  # norms, and biases, which would all start alike
                whole = where.endswith(("linear_attn.norm.weight", "dt_bias"))
                weight.normal_(float(whole), 0.3)
            elif where.endswith("conv1d.weight"):
                weight.normal_(0, 0.5)
    model.save_pretrained(path)
    if seed % 2:
        respell(path / "config.json", config)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (2, LENGTH))
    # In float32 the reference is farther from this than we are (seed 7: 2e-3 to 4e-4, of 20).
    model = model.double()
    last = {}
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.update(x=inputs[0]))
    with torch.no_grad():
        # Its cache cannot do without an attention layer.
        out = model(torch.as_tensor(ids), output_hidden_states=True, use_cache=False)
    states = [*out.hidden_states[:-1], last["x"]]
    return ids.astype(np.int32), out.logits.numpy(), np.stack([s.numpy() for s in states])


def respell(file, config):
    """Write rope outside `rope_parameters`, and an interval for layer types where there is one."""
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    fields["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    full = [i + 1 for i, name in enumerate(config.layer_types) if name == KINDS["F"]]
    if full and full == list(range(full[0], config.num_hidden_layers + 1, full[0])):
        del fields["layer_types"]
        fields["full_attention_interval"] = full[0]
    file.write_text(json.dumps(fields))
