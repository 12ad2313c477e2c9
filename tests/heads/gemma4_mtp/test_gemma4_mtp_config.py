"""Settings that cannot be meant are refused when they are made."""

from typing import Any

import pytest

from specjax.core.errors import ConfigError
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"centroids": 4, "centroid_top_k": 5}, "centroid_top_k must be in 1..4"),
        ({"position": "draft"}, "'draft_window' or 'draft_serving'"),
        ({"steps": 0}, "at least 1"),
        ({"hidden": -1}, "negative"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Gemma4MtpConfig(**settings)
