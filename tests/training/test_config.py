import subprocess
import sys
from typing import Any

import pytest

from specjax.core.errors import ConfigError
from specjax.training.config import DataConfig, OptimConfig, TrainerConfig

DATA = DataConfig(files="a.jsonl")


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (OptimConfig, {"lr": 0.0}, "Optim.lr must be above 0, got 0.0"),
        (OptimConfig, {"warmup": 1.5}, "Optim.warmup must lie in 0 to 1"),
        (OptimConfig, {"betas": (0.9, 1.0)}, "Optim.betas lie in"),
        (OptimConfig, {"clip": -1.0}, "Optim.clip must be at least 0"),
        (DataConfig, {"max_length": 1}, "Data.max_length must be at least 2"),
        (DataConfig, {"lengths": (64, 32)}, "Data.lengths must ascend"),
        (DataConfig, {"lengths": (64, 128)}, "at or above Data.max_length 512"),
        (DataConfig, {"pack": True, "lengths": (64, 512)}, "Data.pack takes one of Data.lengths"),
        (TrainerConfig, {"data": DATA, "batch_size": 0}, "Trainer.batch_size must be at least 1"),
        (TrainerConfig, {"data": DATA, "steps": 0}, "Trainer.steps must be at least 1"),
        (TrainerConfig, {"data": DATA, "ema": 1.0}, "Trainer.ema must lie in 0 to below 1"),
        (TrainerConfig, {"data": DATA, "feature_noise": -0.1}, "Trainer.feature_noise must be at"),
        (TrainerConfig, {}, "Data.files is empty"),
    ],
)
def test_refuses(make: Any, given: dict[str, Any], message: str) -> None:
    required = {"target": "t", "out": "o"} if make is TrainerConfig else {}
    with pytest.raises(ConfigError, match=message) as caught:
        make(**required, **given)
    assert "\n" not in str(caught.value)


def test_buckets() -> None:
    assert DataConfig(max_length=448).buckets() == (112, 224, 336, 448)
    assert DataConfig(max_length=3).buckets() == (1, 2, 3)
    assert DataConfig(max_length=100, lengths=(50, 128)).buckets() == (50, 128)
    assert DataConfig(max_length=100, pack=True).buckets() == (100,)
    assert DataConfig(max_length=100, lengths=(300,), pack=True).buckets() == (300,)


def test_paths() -> None:
    assert DATA.paths == ("a.jsonl",)
    assert DataConfig(files=("a", "b")).paths == DataConfig(files="a, b").paths == ("a", "b")


def test_imports_nothing_heavy() -> None:
    code = "import sys, specjax.training.config; print('jax' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
