"""A step spread over eight devices is the step of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import targets
from specjax.core.mesh_config import MeshConfig
from specjax.core.params import init_params
from specjax.data.chat import Encoded
from specjax.data.dataset import Batches
from specjax.heads.base import borrow
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead
from specjax.targets.base import Target
from specjax.training.config import OptimConfig
from specjax.training.placement import Placement
from specjax.training.trainer import Trainer
from tests.training import toy

pytestmark = pytest.mark.devices8
TARGET = {
    **toy.TARGET,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 4,
}
MESHES = {
    "data": MeshConfig(data=8),
    "fsdp": MeshConfig(fsdp=8),
    "tensor": MeshConfig(tensor=8),
    "all": MeshConfig(data=2, fsdp=2, tensor=2),
}


@pytest.fixture(scope="module")
def loaded() -> tuple[Target, Any]:
    target = targets.from_config(TARGET)
    return target, init_params(target.specs(), jax.random.key(1), scale=0.2)


def make_head(kind: str, target: Target, params: Any) -> tuple[Any, Any]:
    info, lent = target.info, borrow(target, params)
    if kind == "eagle3":
        assert info.draft_block is not None
        config = Eagle3Config(taps=(1, 2, 3), mlp=16, ttt_length=3)
        head: Any = Eagle3Head.for_target(info, info.draft_block, config)
    elif kind == "dspark":
        head = DFlashHead.for_target(
            info,
            DFlashConfig(
                taps=(1, 3),
                block_size=4,
                sample_from_anchor=True,
                mask_token_id=90,
                layers=1,
                mlp=16,
                markov_rank=8,
                confidence=True,
                num_anchors=8,
            ),
        )
    else:
        head = MtpHead.for_target(info, MtpConfig(steps=2))
    return head, head.init(jax.random.key(2), lent)


def run(folder: Path, loaded: Any, kind: str, mesh: MeshConfig, **changes: Any) -> Trainer:
    """Train a little on a mesh."""
    target, params = loaded
    head, start = make_head(kind, target, params)
    config = toy.make_config(folder, **{"mesh": mesh, "batch_size": 8, "steps": 4, **changes})
    place = Placement.of(mesh, 8).target(target.specs())
    batches = Batches(toy.make_rows(32), 8, (16,), seed=3)
    trainer = Trainer(config, target, jax.device_put(params, place), head, start, batches)
    trainer.run()
    return trainer


def curve(folder: Path) -> np.ndarray:
    lines = (folder / "run" / "train.jsonl").read_text().splitlines()
    return np.array([[(x := json.loads(line))["loss"], x["gradient_norm"]] for line in lines])


@pytest.mark.parametrize(
    ("kind", "meshes"), [("eagle3", tuple(MESHES)), ("dspark", ("all",)), ("mtp", ("all",))]
)
def test_losses_are_those_of_one_device(
    tmp_path: Path, loaded: Any, kind: str, meshes: tuple[str, ...]
) -> None:
    one = run(tmp_path / "one", loaded, kind, MeshConfig(), ema=0.5)
    for name in meshes:
        many = run(tmp_path / name, loaded, kind, MESHES[name], ema=0.5)
        np.testing.assert_allclose(curve(tmp_path / name), curve(tmp_path / "one"), rtol=1e-4)
        for path, want in one.state.result.items():
            got = many.state.result[path]
            np.testing.assert_allclose(got, want, atol=2e-5, err_msg=f"{name} {path}")


def test_f28_a_device_without_supervised_tokens(tmp_path: Path, loaded: Any) -> None:
    """F28: half the devices get rows without answers; loss and gradient are the other half's."""
    target, params = loaded
    rows = toy.make_rows(8)
    silent = [Encoded(row.ids, np.zeros_like(row.mask)) for row in rows[:4]]
    found = {}
    for name, mesh, part in (
        ("two", MeshConfig(data=2), [*silent, *rows[4:]]),
        ("one", MeshConfig(), rows[4:]),
    ):
        head, start = make_head("eagle3", target, params)
        config = toy.make_config(tmp_path / name, mesh=mesh, batch_size=len(part), steps=1)
        batches = Batches(part, len(part), (16,), shuffle=False)
        place = Placement.of(mesh, len(part)).target(target.specs())
        placed = jax.device_put(params, place)
        record = Trainer(config, target, placed, head, start, batches).run().record
        found[name] = [record["loss"], record["gradient_norm"], record["skipped"]]
    np.testing.assert_allclose(found["two"], found["one"], rtol=1e-5)
    assert found["one"][0] > 0.1 and found["two"][2] == 0


def test_nothing_is_held_whole_that_can_be_split(tmp_path: Path, loaded: Any) -> None:
    """Bytes on a device: masters and moments over fsdp, the target's products over tensor."""
    many = run(tmp_path, loaded, "eagle3", MESHES["all"])

    def shares(tree: Any) -> list[float]:
        arrays = [x for x in jax.tree.leaves(tree) if x.ndim == 2]
        return [x.addressable_shards[0].data.nbytes / x.nbytes for x in arrays]

    masters = shares(many.state.trained)
    assert set(masters) == {0.25, 0.5} and masters.count(0.25) > masters.count(0.5)
    assert shares(many.state.optimizer) == 2 * masters  # both moments
    assert set(shares(many.fixed.target)) == {0.5}
    compiled = many.steps.train._cache_size()
    assert compiled == 1  # one shape, one program: the state's shardings do not drift


def test_resumes_on_another_mesh(tmp_path: Path, loaded: Any) -> None:
    """Steps 3 and 4 on a mesh of another shape: the curve is that of an unbroken run."""
    steady = OptimConfig(lr=1e-2, schedule="constant", warmup=0.0)  # no rate that follows `steps`
    run(tmp_path / "one", loaded, "eagle3", MeshConfig(), optim=steady)
    run(tmp_path / "two", loaded, "eagle3", MESHES["fsdp"], optim=steady, steps=2)
    run(tmp_path / "two", loaded, "eagle3", MESHES["all"], optim=steady)
    assert len(curve(tmp_path / "two")) == 4
    np.testing.assert_allclose(curve(tmp_path / "two"), curve(tmp_path / "one"), rtol=1e-4)


@pytest.mark.slow
def test_decodes_on_a_mesh(tmp_path: Path, loaded: Any) -> None:
    """Decoding in the loop takes the weights where they lie."""
    target, params = loaded
    found = {}
    for name in ("one", "tensor"):
        mesh = MESHES.get(name, MeshConfig())
        head, start = make_head("eagle3", target, params)
        config = toy.make_config(
            tmp_path / name, mesh=mesh, batch_size=8, steps=1, decode_every=1, decode_tokens=8
        )
        place = Placement.of(mesh, 8).target(target.specs())
        batches = Batches(toy.make_rows(8), 8, (16,), seed=3)
        heldout = Batches(toy.make_rows(8, seed=9), 8, (16,), shuffle=False)
        placed = jax.device_put(params, place)
        trainer = Trainer(config, target, placed, head, start, batches, heldout)
        found[name] = trainer.run().record["decoded_mean_acceptance_length"]
    assert found["one"] == pytest.approx(found["tensor"]) and found["one"] >= 1
