"""Settings of heads: their limits, and that reading them needs no jax."""

import subprocess
import sys

import pytest

from specjax.core.errors import ConfigError
from specjax.heads.eagle3.config import Eagle3Config


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttt_length": 0},
        {"step_loss_decay": 0.0},
        {"mask_shift": 3},
        {"fc_norm": True, "norm_before_fc": True},
        {"mlp": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_values_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Eagle3Config(**wrong)


def test_reading_settings_imports_no_jax() -> None:
    code = "import sys, specjax.heads.eagle3.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
