"""What a head is, as a record: layers, sizes and costs against figures worked out by hand."""

import dataclasses
import json

import numpy as np
import pytest

from specjax.core.errors import CheckpointError, PairingError
from specjax.core.params import count
from specjax.heads import catalog
from specjax.heads.catalog import Published
from specjax.heads.describe import (
    Cost,
    candidates,
    describe,
    describe_directory,
    describe_entry,
    parameter_counts,
    round_cost,
)
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead
from specjax.io.hf import write_safetensors
from specjax.targets import catalog as targets

TINY_TARGET = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TINY_HEAD = {
    **TINY_TARGET,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 5,
}


def record_of(name):
    """A head of the catalogue, as built for the target it was made for."""
    entry = catalog.read(name)
    return describe_entry(entry, entry.targets[0])


def folder(path, config, tensors=None):
    """A checkpoint directory; `tensors` are its weights, None for none."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        write_safetensors(tensors, path / "model.safetensors")
    return path


def test_an_eagle3_head() -> None:
    record = describe_entry(catalog.read("Qwen3-8B-speculator.eagle3"))
    assert (record.algorithm, record.num_layers, record.layers) == ("eagle3", 1, "1 full")
    assert record.fits == record.targets == ("Qwen3-8B",)
    refused = {name: why for why, names in record.refused for name in names}
    assert refused.keys() | {"Qwen3-8B"} == set(targets.names())
    assert refused["Qwen3-4B"] == "it is for a target of width 4096, this one is 2560"
    assert "vocabulary of 151936" in refused["Kimi-K2.5"]
    assert (record.drafts, record.most, record.block) == (3, None, None)
    assert (record.draft_vocab, record.vocab) == (32000, 151936)
    assert record.max_context == 40960
    assert not record.confidence
    layer = 2 * 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288
    fused, output = 3 * 4096**2, 32000 * 4096
    assert record.trained == fused + layer + 4 * 4096
    assert record.stored == record.trained + output + 151936 * 4096
    products = fused + 3 * (layer + output)
    # Keys and values in bfloat16; the last output in float32, and the length.
    assert record.cost == Cost(3, 3, products, 2 * products, 2 * 8 * 128 * 2, 4096 * 4 + 4)


def test_a_block_head() -> None:
    record = record_of("gemma-4-31B-it-speculator.dspark")
    assert (record.algorithm, record.num_layers) == ("dspark", 5)
    assert record.layers == "5 sliding-window 2048"
    assert (record.drafts, record.most, record.block) == (7, 7, (8, 4))
    assert record.confidence
    width, heads, kv_heads, head_dim = 5376, 32, 16, 256
    keys = 2 * width * kv_heads * head_dim
    rest = 2 * width * heads * head_dim + 3 * width * 21504
    fused, output, w2, confidence = 5 * width**2, 32000 * width, 32000 * 256, width + 256
    assert record.cost.passes == 1
    assert record.cost.multiply_adds == (
        fused + 5 * (9 * keys + 8 * rest) + 7 * (output + w2 + confidence)
    )
    assert record.cost.weight_bytes == 2 * (
        fused + 5 * (2 * keys + rest) + output + 7 * w2 + confidence
    )
    assert record.cost.state_per_token == 0
    assert record.cost.state_fixed == 5 * 2048 * 2 * kv_heads * head_dim * 2 + 4


def test_layers_by_kind_and_a_borrowed_output() -> None:
    record = record_of("Qwen3.5-4B-DFlash")
    assert record.layers == "1 full, 5 sliding-window 4096"
    assert record.trained == record.stored
    assert (record.drafts, record.most, record.block) == (15, 15, (16, 248077))
    # The target's output layer, over all its tokens, costs as one of its own would.
    entry = catalog.read("Qwen3.5-4B-DFlash")
    (info,) = candidates("Qwen3.5-4B").values()
    less = round_cost(entry.build(info), info, 14)
    assert record.cost.multiply_adds - less.multiply_adds == 248320 * 2560
    assert record.cost.weight_bytes == less.weight_bytes
    assert record.cost.state_per_token == 2 * 8 * 128 * 2  # the one full layer


def test_an_assistant() -> None:
    record = record_of("gemma-4-E2B-it-assistant")
    assert (record.algorithm, record.num_layers) == ("gemma4_mtp", 4)
    assert record.layers == "1 full, 3 sliding-window 512"
    assert (set(record.reads), record.taps) == ({13, 14}, ())
    assert (record.drafts, record.most) == (2, None)
    assert record.draft_vocab == 262144
    width, target = 256, 1536
    layers = 2 * width * 4 * (3 * 256 + 512) + 4 * 3 * width * 2048
    # All centroids, and the tokens of the 32 best.
    output = 2048 * width + 32 * 128 * width
    products = 2 * (3 * target * width + layers + output)
    assert (record.cost.passes, record.cost.multiply_adds) == (2, products)
    assert record.cost.weight_bytes == 2 * products
    assert record.cost.state_per_token == 0  # it reads the target's


def test_an_assistant_without_centroids() -> None:
    record = record_of("gemma-4-31B-it-assistant")
    width, target = 1024, 5376
    layers = 2 * width * 32 * (3 * 256 + 512) + 4 * 3 * width * 8192
    output = 262144 * width
    assert record.cost.multiply_adds == 4 * (3 * target * width + layers + output)


def test_modules_with_experts() -> None:
    record = record_of("Qwen3.5-35B-A3B:mtp")
    assert (record.algorithm, record.num_layers, record.layers) == ("mtp", 1, "1 full")
    assert record.targets == ("Qwen3.5-35B-A3B",)
    width = 2048
    # Queries come with a gate; 8 of 256 experts and a shared one with its own gate.
    attention = width * (2 * 16 + 2 * 2) * 256 + 16 * 256 * width
    experts = (8 + 1) * 3 * width * 512 + width * 256 + width
    products = 2 * width**2 + attention + experts + 248320 * width
    assert record.cost.multiply_adds == record.cost.drafts * products
    assert record.cost.state_per_token == 2 * 2 * 256 * 2


def test_each_module_gives_a_draft_and_the_last_one_the_others() -> None:
    (info,) = candidates("Qwen3.5-4B").values()
    one, two = (MtpHead.for_target(info, MtpConfig(modules=n)) for n in (1, 2))
    for drafts in (2, 3, 5):
        assert (
            round_cost(one, info, drafts).multiply_adds
            == round_cost(two, info, drafts).multiply_adds
        )
    # Committed tokens go through every module, wanted or not.
    output = 248320 * 2560
    single = round_cost(one, info, 1).multiply_adds - output
    assert round_cost(two, info, 1).multiply_adds - output == 2 * single


def test_modules_with_latent_attention() -> None:
    record = record_of("DeepSeek-V3:mtp")
    assert record.layers == "1 latent"
    assert record.cost.state_per_token == (512 + 64) * 2


def test_facts_of_the_entry_are_kept() -> None:
    entry = catalog.read("gemma-4-31B-it-speculator.eagle3")
    record = describe_entry(entry, "gemma-4-31B-it")
    assert (record.published, record.unverified, record.source) == (
        entry.published, entry.unverified, entry.source,
    )  # fmt: skip
    assert record.taps == (2, 30, 57)
    assert record.refused == ()


def test_counts_leave_tables_of_ids_out() -> None:
    entry = catalog.read("Kimi-K25-eagle3")
    (info,) = candidates("Kimi-K2.5").values()
    head = entry.build(info)
    assert parameter_counts(head) == (count(head.specs()) - 32000 - 163840,) * 2


def test_directory(tmp_path) -> None:
    target = folder(tmp_path / "target", TINY_TARGET)
    with pytest.raises(PairingError, match="stores no d2t"):
        describe_directory(folder(tmp_path / "bare", TINY_HEAD), str(target))
    tensors = {"lm_head.weight": np.zeros((5, 8)), "d2t": np.zeros(5), "t2d": np.zeros(16)}
    head = folder(tmp_path / "head", TINY_HEAD, tensors)
    record = describe_directory(head, str(target))
    assert (record.name, record.fits, record.targets) == ("head", ("target",), ())
    assert (record.algorithm, record.draft_vocab, record.source) == ("eagle3", 5, str(head))
    assert record.cost.drafts == 3  # nobody says how many
    assert (record.published, record.unverified) == (Published(), ())


def test_a_directory_that_fits_nothing(tmp_path) -> None:
    tensors = {"lm_head.weight": np.zeros((5, 8)), "d2t": np.zeros(5), "t2d": np.zeros(16)}
    head = folder(tmp_path / "head", TINY_HEAD, tensors)
    with pytest.raises(PairingError, match="head, a head of kind eagle3, fits no target of the"):
        describe_directory(head)
    with pytest.raises(PairingError, match="head is for a vocabulary of 16 tokens, the target has"):
        describe_directory(head, "Qwen3-8B")
    with pytest.raises(CheckpointError, match="no target 'Qwen3-8b' in the catalogue"):
        describe_directory(head, "Qwen3-8b")


def test_a_directory_that_is_no_head(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        describe_directory(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="is no draft head"):
        describe_directory(folder(tmp_path / "target", TINY_TARGET))


def test_a_head_is_described_for_the_target_it_was_made_for() -> None:
    entry = dataclasses.replace(catalog.read("Qwen3-8B-speculator.eagle3"), targets=("b",))
    (info,) = candidates("Qwen3-8B").values()
    deeper = dataclasses.replace(info, num_layers=info.num_layers + 1)
    record = describe(entry, {"a": info, "b": deeper})
    assert (record.fits, record.taps) == (("a", "b"), (2, 18, 34))
