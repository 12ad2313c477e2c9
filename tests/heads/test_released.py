"""What the layouts of released heads share."""

from typing import Any

import numpy as np
import pytest

from specjax.core.errors import CheckpointError, PairingError
from specjax.heads import released, vocabulary
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.blocks.geometry import PlainGeometry
from specjax.layers.rope import RopeConfig


def body(**changes: Any) -> dict[str, Any]:
    fields = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    return {**fields, "num_key_value_heads": 1, "rope_theta": 1e4, **changes}


@pytest.mark.parametrize(
    ("fields", "types"),
    [
        ({}, ("full", "full", "full")),
        ({"use_sliding_window": True, "max_window_layers": 1}, ("full", "sliding", "sliding")),
        ({"use_sliding_window": False, "max_window_layers": 1}, ("full", "full", "full")),
        (
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            ("sliding", "full", "sliding"),
        ),
    ],
)
def test_layer_types_are_read_or_follow(fields: dict[str, Any], types: tuple[str, ...]) -> None:
    assert released.read_layer_types(fields, 3, "x") == types


def test_a_head_size_that_is_not_stated_is_read_off_the_tensors() -> None:  # F11
    shapes = {"layers.0.self_attn.q_proj.weight": (40, 16)}
    geometry = released.read_geometry(body(), shapes, "layers.0.", "x")
    assert isinstance(geometry, PlainGeometry)
    assert geometry.block.head_dim == 20 and not geometry.block.qk_norm
    stated = released.read_geometry(body(head_dim=10), shapes, "layers.0.", "x")
    assert stated.sizes == (1, 10, 10)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dims", [12, 6])
def test_plain_layers_survive(norm: bool, dims: int) -> None:
    rope = RopeConfig(theta=3e5, dims=dims)
    block = BlockConfig(16, 2, 1, 12, 24, 1e-5, rope, qk_norm=norm, attention_bias=True)
    written = released.write_geometry(PlainGeometry(block))
    shapes = {"l.self_attn.q_norm.weight": (12,)} if norm else {}
    assert released.read_geometry(written, shapes, "l.", "x") == PlainGeometry(block)


def test_gemma_layers_of_another_kind_are_refused() -> None:
    ropes = {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    gemma = body(
        model_type="gemma4_text",
        head_dim=8,
        global_head_dim=8,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        rope_parameters=ropes,
    )
    with pytest.raises(CheckpointError, match="full-attention ones, all alike"):
        released.read_geometry(gemma, {}, "layers.0.", "x")
    alike = released.read_geometry(
        {**gemma, "layer_types": ["full_attention"] * 2}, {}, "layers.0.", "x"
    )
    assert (
        released.read_geometry(
            {
                **released.write_geometry(alike),
                "num_hidden_layers": 1,
                "layer_types": ["full_attention"],
            },
            {},
            "layers.0.",
            "x",
        )
        == alike
    )


def test_maps_must_agree() -> None:
    d2t, t2d = np.array([1, 2, 3]), np.array([0, 1, 0, 1, 0, 1], bool)
    vocabulary.check_maps(d2t, t2d, "x")
    with pytest.raises(PairingError, match="x: d2t and t2d choose different"):
        vocabulary.check_maps(d2t, ~t2d, "x")
    with pytest.raises(PairingError, match="x: d2t is no map"):
        vocabulary.check_maps(np.array([3, 2, 1]), t2d, "x")


def test_a_part_of_a_vocabulary_needs_a_map() -> None:
    full = {"lm_head.weight": (6, 4)}
    assert released.read_vocabulary({}, full, 6, "x") == (6, False)
    short = {"lm_head.weight": (3, 4)}
    with pytest.raises(PairingError, match="3 of 6 tokens but stores no d2t"):
        released.read_vocabulary({}, short, 6, "x")
    assert released.read_vocabulary({}, {**short, "d2t": (3,)}, 6, "x") == (3, True)
