"""Random configurations of both families, and transformers' answers to them."""

import json

import numpy as np

LENGTH = 14


def random_config(family, seed):
    """A small configuration; over six consecutive seeds every feature is on and off."""
    rng = np.random.default_rng(seed)
    heads, groups = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    head_dim = 2 * int(rng.integers(3, 9))
    config = {
        "vocab_size": int(rng.integers(60, 131)),
        # A multiple of the heads, which transformers asks for, but hardly heads * head_dim.
        "hidden_size": heads * groups * int(rng.integers(3, 9)),
        "intermediate_size": int(rng.integers(20, 70)),
        "num_hidden_layers": int(rng.integers(2, 5)),
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 1e-3])),
        "tie_word_embeddings": seed % 2 == 0,
        "attention_bias": seed % 3 != 1,
        "initializer_range": 0.3,
        "rope_parameters": random_rope(rng, seed),
    }
    if family == "llama":
        config["mlp_bias"] = seed % 3 != 2
        if seed % 6 == 5:  # head_dim follows from the width
            del config["head_dim"]
            config["hidden_size"] = heads * groups * head_dim
    return config


def random_rope(rng, seed):
    scalings = [
        {
            "rope_type": "llama3",
            "factor": float(rng.uniform(2, 16)),
            "low_freq_factor": 1.0,
            "high_freq_factor": float(rng.uniform(2, 6)),
            "original_max_position_embeddings": int(rng.integers(16, 64)),
        },
        {
            "rope_type": "yarn",
            "factor": float(rng.uniform(2, 8)),
            "original_max_position_embeddings": int(rng.integers(32, 128)),
            "beta_fast": float(rng.choice([8, 32])),
        },
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": float(rng.uniform(1.5, 4))},
    ]
    return {"rope_theta": float(rng.choice([500.0, 1e4, 1e6])), **scalings[seed % 4]}


def write_checkpoint(family, seed, path, old_spelling):
    """Write a random checkpoint of transformers and return (ids, logits, hidden states).

    The hidden states are `[L + 1, B, T, H]`, the last one before the final norm.
    """
    import torch
    import transformers

    names = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{names}Config")(**random_config(family, seed))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{names}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms start at one and biases at zero, which would hide them
                weight.normal_(float(name.endswith("norm.weight")), 0.3)
    model.save_pretrained(path)
    if old_spelling:
        _respell(path / "config.json")
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (2, LENGTH))
    last = {}
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.update(x=inputs[0]))
    with torch.no_grad():
        out = model(torch.as_tensor(ids), output_hidden_states=True)
    states = [*out.hidden_states[:-1], last["x"]]
    return ids.astype(np.int32), out.logits.numpy(), np.stack([s.numpy() for s in states])


def _respell(file):
    """Write the rope as releases before transformers 5 do."""
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    file.write_text(json.dumps(config))
