"""The study of the five methods: every configuration holds together, on shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from specjax import config
from specjax.core.mesh_config import AXES
from specjax.core.params import shapes
from specjax.core.paths import configs_dir
from specjax.core.sharding import SERVED, Layout
from specjax.decode.config import EngineConfig
from specjax.decode.engine import Engine
from specjax.decode.round import init_state, one_round
from specjax.evaluation.config import EvalConfig, cell_settings, listed
from specjax.heads import catalog as heads
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.planner.storage import stored_specs
from specjax.targets import catalog as targets
from specjax.targets.base import Target

STUDIES = sorted(
    file.stem for file in (configs_dir() / "studies").glob("*.gin") if file.stem != "common"
)
MI300X = 192e9  # bytes of the smaller of the two chips
# The pairs of the study: target and the kind of head.
PAIRS = {
    ("gemma-4-26B-A4B-it", "gemma4_mtp"),
    ("gemma-4-26B-A4B-it", "dflash"),
    ("gemma-4-31B-it", "gemma4_mtp"),
    ("gemma-4-31B-it", "dflash"),
    ("Qwen3.5-122B-A10B", "mtp"),
    ("Kimi-K2.5", "eagle3"),
    ("Kimi-K2.5", "dflash"),
    ("MiniMax-M2.5", "eagle3"),
    ("Qwen3-8B", "eagle3"),
    ("Qwen3-8B", "dflash"),
    ("Qwen3-8B", "dspark"),
}


@functools.cache
def cells(study: str) -> tuple[EvalConfig, ...]:
    """All evaluations of a study, as the command would build them."""
    given = config.parse([f"--gin_file=studies/{study}.gin"])
    found = []
    for values in cell_settings(given.build("Sweep")):
        cell = given.override(values, "in the sweep")
        cell.build("Sweep")
        found += listed(cell.build("Eval"))
        cell.check_all_used()
    return tuple(found)


def head_of(cell: EvalConfig, target: Target) -> Any:
    """The head that a cell names, without weights."""
    name = Path(cell.target).name
    if cell.head.startswith("runs/"):  # to be trained by the reader
        return Eagle3Head.for_target(target.info, target.info.draft_block, Eagle3Config())
    entry = f"{name}:mtp" if cell.head == "mtp" else Path(cell.head).name
    return heads.read(entry).build(target.info)


@pytest.mark.parametrize("study", STUDIES)
def test_a_round_of_every_pair_on_its_mesh(study: str) -> None:
    """The widest cell of each head: it fits the target, everything has a place on every device."""
    first = cells(study)[0]
    entry, mesh = targets.read(Path(first.target).name), first.engine.mesh
    sizes = tuple(getattr(mesh, axis) for axis in AXES)
    devices = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    layout = Layout.of(mesh, SERVED, devices)
    target = dataclasses.replace(entry.build(first.target_options), layout=layout)

    def place(specs: Any) -> tuple[Any, int]:
        """Return (shapes, bytes on a device)."""
        found, where = shapes(specs, first.dtype), layout.weights(specs)
        share = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), found, where)
        sizes = jax.tree.map(lambda x, n: x.dtype.itemsize * n, found, share)
        return found, sum(jax.tree.leaves(sizes))

    params, held = place(stored_specs(target.specs(), entry.config, None))
    for source in dict.fromkeys(cell.head for cell in cells(study)):
        own = [cell for cell in cells(study) if cell.head == source]
        head = head_of(own[0], target)
        width = max(cell.num_speculative_tokens for cell in own)
        drafting, more = place(head.specs())
        assert held + more < 0.75 * MI300X
        engine = Engine(target, params, head, drafting, EngineConfig(width))
        decoder = dataclasses.replace(engine.decoder, layout=layout)
        state = jax.eval_shape(lambda d=decoder: init_state(d, 1, 128, "bfloat16"))
        after = jax.eval_shape(functools.partial(one_round, decoder), engine.weights, state)
        assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)


def test_the_pairs_are_those_of_the_study() -> None:
    found = set()
    for study in STUDIES:
        for cell in cells(study):
            target = targets.read(Path(cell.target).name).build()
            found.add((Path(cell.target).name, head_of(cell, target).name))
            assert cell.prompts in ("gsm8k", "math500", "humaneval", "mbpp")
    assert found == PAIRS
