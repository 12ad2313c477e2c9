"""Fields of a published configuration."""

import pytest

from specjax.core.errors import CheckpointError
from specjax.core.published import required


def test_fields_come_in_the_order_asked():
    assert required({"a": 0, "b": [1], "c": None}, "b", "a") == ([1], 0)


def test_every_missing_field_is_named():
    with pytest.raises(CheckpointError, match=r"config\.json lacks b, c$"):
        required({"a": 1, "c": None}, "a", "b", "c")
