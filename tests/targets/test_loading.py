"""Loading a part of a target."""

import jax
import numpy as np
import pytest

from specjax import targets
from specjax.heads.base import borrow
from tests.targets.parity import FIXTURES


@pytest.mark.parametrize("family", ["llama", "gemma4_moe", "qwen3_5_moe", "kimi_k25", "minimax_m2"])
def test_without_layers_there_is_what_heads_borrow(family: str) -> None:
    target, whole = targets.load(FIXTURES / family)
    same, part = targets.load(FIXTURES / family, layers=False)
    assert same == target and part.layers == () and part.extra is None
    mine, its = borrow(same, part), borrow(target, whole)
    jax.tree.map(np.testing.assert_array_equal, mine, its)
