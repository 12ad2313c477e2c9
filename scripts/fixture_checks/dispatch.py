"""Which check a fixture needs: by its manifest's `algorithm`, else by its configuration."""

from __future__ import annotations

from collections.abc import Callable

from scripts.fixture_checks import (
    assistant,
    blocks,
    eagle3,
    losses,
    scheduler,
    targets,
    verification,
)
from scripts.fixture_checks.fixture import Fixture
from scripts.fixture_checks.outcome import Outcome

CHECKS: dict[str, Callable[[Fixture], Outcome]] = {
    "target": targets.compute,
    "eagle3": eagle3.compute,
    "dflash": blocks.compute,
    "dspark": blocks.compute,
    "assistant": assistant.compute,
    "lossless speculative verification": verification.compute,
    "distillation losses": losses.compute,
    "confidence-scheduled verification": scheduler.compute,
}


def algorithm_of(fixture: Fixture) -> str:
    """Name the algorithm of a fixture."""
    if fixture.manifest.get("algorithm"):
        return str(fixture.manifest["algorithm"])
    named = [fixture.config.get("speculators_model_type", "")]
    named += fixture.config.get("architectures") or []
    text = " ".join(map(str, named)).lower()
    for algorithm in ("peagle", "eagle3", "dspark", "dflash", "assistant", "mtpdraftmodel"):
        if algorithm in text:
            return algorithm
    if fixture.config:
        return "target"
    # Neither manifest nor model: of the two kinds only verification holds uniform numbers.
    uniform = any(name.endswith("uniforms") for name in fixture.inputs)
    return "lossless speculative verification" if uniform else "distillation losses"


def compute(fixture: Fixture) -> Outcome:
    """Compute what the framework knows of a fixture."""
    algorithm = algorithm_of(fixture)
    if algorithm not in CHECKS:
        return Outcome(otherwise=f"{algorithm!r} is not built here")
    return CHECKS[algorithm](fixture)
