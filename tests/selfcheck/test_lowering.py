"""Rounds and training steps lower for GPUs, and need nothing that ROCm lacks.

The exported program hardly differs between platforms: this shows that no operation is missing a
lowering and that no vendor's kernel is called, not that a compiler or a kernel is right. Only a run
on the hardware does (`specjax doctor --parity`).
"""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from jax import export

from specjax.selfcheck.parity import programs
from specjax.selfcheck.tiny import FAMILIES, HEADS

PLATFORMS = ("rocm", "cuda")
# Operations outside StableHLO that XLA expands by itself on every platform (`scan`: running sums of
# jax 0.12 on GPUs, to XLA's own instruction with an expander of its own).
_EXPANDED = {"erf", "scan", "square", "top_k"}
_CUSTOM = re.compile(r'custom_call @"?([\w.$]+)')


def lowered(function: Any, args: Any) -> str:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return export.export(jax.jit(function), platforms=PLATFORMS)(*shapes).mlir_module()


def check(module: str) -> None:
    # Shardings and barriers are marks, not calls.
    calls = set(_CUSTOM.findall(module)) - {"Sharding", "SPMDFullToShardShape"}
    assert not calls, f"kernels called by name: {calls}"
    outside = set(re.findall(r"\bchlo\.(\w+)", module)) - _EXPANDED
    assert not outside, f"operations that XLA may not expand: {outside}"


@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_of_every_family(family: str) -> None:
    for _, function, args in programs((family,), ()):
        check(lowered(function, args))


@pytest.mark.parametrize("kind", HEADS)
def test_rounds_and_training_of_every_head(kind: str) -> None:
    seen = 0
    for _, function, args in programs((), (kind,)):
        check(lowered(function, args))
        seen += 1
    assert seen == 2


def test_a_kernel_of_a_vendor_would_be_found() -> None:
    def factor(x: jax.Array) -> jax.Array:
        return jax.numpy.linalg.qr(x)[0]

    shape = jax.ShapeDtypeStruct((8, 8), jax.numpy.float32)
    with pytest.raises(AssertionError, match="kernels called by name"):
        check(export.export(jax.jit(factor), platforms=["cuda"])(shape).mlir_module())
