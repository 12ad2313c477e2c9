"""The tiny target, made once."""

from typing import Any

import pytest

from specjax.targets.base import Target
from tests.training import toy


@pytest.fixture(scope="session")
def target() -> tuple[Target, Any]:
    return toy.make_target()
