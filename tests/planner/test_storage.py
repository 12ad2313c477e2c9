"""Weights as releases store them, against the sizes that their publishers give."""

import math

import jax
import pytest

from specjax.core.params import shapes
from specjax.planner.storage import Stored, stored_specs
from specjax.targets import catalog
from specjax.targets.config import TargetConfig


def gigabytes(name: str) -> float:
    entry = catalog.read(name)
    specs = entry.build(TargetConfig(layer_loop="scan")).specs()
    leaves = jax.tree.leaves(shapes(stored_specs(specs, entry.config, None), "bfloat16"))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) / 1e9


@pytest.mark.parametrize(
    ("name", "bits"),
    # A dense bfloat16 release; fp8 with few exceptions; int4 experts with a bfloat16 scale per 32.
    [("Qwen3-8B", 16.0), ("MiniMax-M2.5", 8.1), ("Kimi-K2.5", 4.7)],
)
def test_size(name: str, bits: float) -> None:
    counted = {"Qwen3-8B": 8.191, "MiniMax-M2.5": 228.69, "Kimi-K2.5": 1026.4}
    assert gigabytes(name) == pytest.approx(counted[name] * bits / 8, rel=0.02)


def test_what_a_release_leaves_out() -> None:
    kimi = Stored(catalog.read("Kimi-K2.5").config)
    layer = "model.layers.3."
    assert f"{layer}mlp.experts.7.gate_proj.weight_packed" in kimi
    for module in ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.gate"):
        assert f"{layer}{module}.weight_packed" not in kimi
    assert "lm_head.weight_packed" not in kimi
    minimax = Stored(catalog.read("MiniMax-M2.5").config)
    assert f"{layer}self_attn.q_proj.weight_scale_inv" in minimax
    assert f"{layer}block_sparse_moe.gate.weight_scale_inv" not in minimax
    assert f"{layer}self_attn.q_proj.weight" not in minimax
