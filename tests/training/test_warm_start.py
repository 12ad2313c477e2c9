"""Training goes on from a head that exists, whatever its shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import heads
from specjax.core.errors import CheckpointError, ConfigError
from specjax.heads.base import borrow
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.mtp.config import MtpConfig
from specjax.targets.base import Target
from specjax.training.warm_start import warm_start
from tests.training import toy

Loaded = tuple[Target, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, target: Loaded) -> tuple[Path, Any]:
    model, weights = target
    block = model.info.draft_block
    assert block is not None
    config = Eagle3Config(taps=(1, 2, 3), mlp=24, ttt_length=5, fc_norm=True)
    head = Eagle3Head.for_target(model.info, block, config)
    params = head.init(jax.random.key(3), borrow(model, weights))
    folder = tmp_path_factory.mktemp("head")
    heads.save(head, params, folder)
    return folder, params


def test_weights_and_shape_are_the_imported_ones(
    tmp_path: Path, target: Loaded, saved: tuple[Path, Any]
) -> None:
    folder, params = saved
    config = toy.make_config(tmp_path, init_from=str(folder))
    settings = Eagle3Config(mlp=99, ttt_length=2, step_loss_decay=0.5)
    head, found, said = warm_start(config, *target, settings, "Eagle3")
    assert (head.config.ttt_length, head.config.step_loss_decay) == (2, 0.5)
    assert head.config.taps == (1, 2, 3) and head.config.fc_norm
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(params))
    assert said.endswith("these have no part: Eagle3.mlp") and "kind eagle3" in said


@pytest.mark.parametrize("settings", [DFlashConfig(mask_token_id=90), MtpConfig()])
def test_a_head_of_another_kind(
    tmp_path: Path, target: Loaded, saved: tuple[Path, Any], settings: Any
) -> None:
    config = toy.make_config(tmp_path, init_from=str(saved[0]))
    with pytest.raises(ConfigError, match="is a head of kind eagle3, which is not trained by"):
        warm_start(config, *target, settings, "DFlash")


def test_a_vocabulary_of_ones_own(tmp_path: Path, target: Loaded, saved: tuple[Path, Any]) -> None:
    config = toy.make_config(tmp_path, init_from=str(saved[0]))
    with pytest.raises(ConfigError, match="exclude each other"):
        warm_start(config, *target, Eagle3Config(draft_vocab="kept.safetensors"), "Eagle3")
    config = toy.make_config(tmp_path, init_from=str(tmp_path / "none"))
    with pytest.raises(CheckpointError):
        warm_start(config, *target, Eagle3Config(), "Eagle3")


@pytest.mark.parametrize("kind", [Eagle3Config, DFlashConfig, MtpConfig])
def test_settings_of_training_exist(kind: Any) -> None:
    assert set(kind.TRAINING) <= set(kind.__dataclass_fields__)
