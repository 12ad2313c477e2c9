"""Names of wrappers and stacked experts, as views of what the files hold."""

import numpy as np
import pytest

from specjax.core.params import ParamSpec, stack
from specjax.io import hf
from specjax.io.names import View, text_name, views


@pytest.mark.parametrize(
    ("published", "ours"),
    [
        ("model.language_model.layers.0.norm.weight", "model.layers.0.norm.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("model.visual.blocks.0.weight", "model.visual.blocks.0.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
    ],
)  # fmt: skip
def test_wrappers_are_taken_off(published, ours):
    assert text_name(published) == ours


def test_stacked_experts_look_like_one_tensor_per_expert():
    found = views({"model.layers.0.mlp.experts.gate_up_proj": (2, 6, 4),
                   "model.layers.0.mlp.experts.down_proj": (2, 4, 3)})  # fmt: skip
    base = "model.layers.0.mlp.experts."
    assert set(found) == {
        f"{base}{e}.{name}_proj.weight" for e in (0, 1) for name in ("gate", "up", "down")
    }
    up = found[f"{base}1.up_proj.weight"]
    assert up == View(f"{base}gate_up_proj", (1, slice(3, 6))) and up.shape((2, 6, 4)) == (3, 4)
    assert found[f"{base}1.down_proj.weight"].shape((2, 4, 3)) == (4, 3)


@pytest.mark.parametrize("index", [None, (slice(None), slice(None)), (slice(1, 3), slice(0, 2)),
                                   (slice(2, 2), slice(None))])  # fmt: skip
def test_a_part_of_a_view_is_a_part_of_the_tensor(index):
    whole = np.arange(2 * 6 * 4).reshape(2, 6, 4)
    view = View("x", (1, slice(3, 6)))
    wanted = whole[1, 3:6] if index is None else whole[1, 3:6][index]
    np.testing.assert_array_equal(whole[view.part(whole.shape, index)], wanted)


def test_stacked_and_single_experts_load_alike(tmp_path):
    rng = np.random.default_rng(0)
    gate_up, down = rng.normal(size=(3, 8, 5)), rng.normal(size=(3, 5, 4))
    base = "model.layers.0.mlp.experts."
    single = {f"{base}{e}.gate_proj.weight": gate_up[e, :4] for e in range(3)}
    single |= {f"{base}{e}.up_proj.weight": gate_up[e, 4:] for e in range(3)}
    single |= {f"{base}{e}.down_proj.weight": down[e] for e in range(3)}
    wrapped = {
        f"model.language_model.layers.0.mlp.experts.{name}": array
        for name, array in (("gate_up_proj", gate_up), ("down_proj", down))
    }
    specs = {
        name: stack(
            [ParamSpec(shape, (None, None), f"{base}{e}.{name}_proj.weight") for e in range(3)],
            "experts",
        )
        for name, shape in (("gate", (4, 5)), ("up", (4, 5)), ("down", (5, 4)))
    }
    loaded = []
    for i, tensors in enumerate((single, wrapped)):
        path = tmp_path / f"{i}" / "model.safetensors"
        hf.write_safetensors({k: v.astype(np.float32) for k, v in tensors.items()}, path)
        loaded.append(hf.load_params(specs, path.parent))
    np.testing.assert_array_equal(loaded[0]["up"], gate_up[:, 4:].astype(np.float32))
    np.testing.assert_array_equal(loaded[0]["down"], down.astype(np.float32))
    for name in specs:
        np.testing.assert_array_equal(loaded[0][name], loaded[1][name])
    exported = hf.export_tensors(specs, loaded[0])
    assert set(exported) == set(single)
    np.testing.assert_array_equal(
        exported[f"{base}2.gate_proj.weight"], single[f"{base}2.gate_proj.weight"].astype("f4")
    )


def test_a_missing_expert_is_named(tmp_path):
    names = [f"experts.{e}.down_proj.weight" for e in range(2)]
    hf.write_safetensors({names[0]: np.zeros((2, 2), "f4")}, tmp_path / "model.safetensors")
    spec = stack([ParamSpec((2, 2), (None, None), name) for name in names], "experts")
    with pytest.raises(hf.CheckpointError, match=r"missing experts.1.down_proj.weight \(2, 2\)"):
        hf.load_params({"w": spec}, tmp_path)
