"""A cache that eight devices write, and a run on eight devices that reads it."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax.core.mesh_config import MeshConfig
from specjax.training.features.batches import from_cache
from specjax.training.features.config import FeaturesConfig
from specjax.training.features.fill import place
from specjax.training.rows import TrainingData
from specjax.training.trainer import Trainer
from tests.training import toy
from tests.training.features.cached import fill, make_config

pytestmark = pytest.mark.devices8
MESH = MeshConfig(data=2, fsdp=2, tensor=2, rules=("vocab=",))  # 97 tokens


@pytest.mark.parametrize("storage", ["bfloat16", "fp8"])
def test_cached_on_a_mesh(tmp_path: Path, target: Any, storage: str) -> None:
    """The losses of a run on one device that runs the target."""
    model, params = target
    data = TrainingData(toy.make_batches(batch_size=8), None, "")
    given = {"target_dtype": "float32", "batch_size": 8, "steps": 4}
    many = make_config(tmp_path / "many", mesh=MESH, **given)
    split = place(many, FeaturesConfig("toy", batch_size=8)).target(model.specs())
    placed = jax.device_put(params, split)
    fill(many, (model, placed), data, storage=storage, batch_size=8)
    cached = from_cache(data, many, model.info, toy.ToyHead()).train
    one = make_config(tmp_path / "one", features="", **given)
    curves = []
    for config, weights, batches in ((one, params, data.train), (many, placed, cached)):
        head = toy.ToyHead()
        Trainer(config, model, weights, head, head.init(), batches).run()
        lines = (Path(config.out) / "train.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in lines])
    np.testing.assert_allclose(curves[1], curves[0], rtol=2e-3 if storage == "bfloat16" else 2e-2)
