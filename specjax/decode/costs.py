"""What a round costs by the tokens it verifies: profiled at start-up, or read from a file.

Scheduled verification weighs what another token is expected to bring against what it costs. The
verify pass exists at a few static widths; between these the cost is interpolated, so that the step
from one to the next does not end every admission, and made monotone, since noise is not a reason
to verify more.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import hosts
from specjax.core.errors import ConfigError
from specjax.decode import round as stages
from specjax.decode.round import Decoder, RoundState, Weights
from specjax.decode.schedule import run_width
from specjax.heads.base import Proposal

if TYPE_CHECKING:
    from specjax.decode.engine import Engine

_REPEATS = 7


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of a round's two large parts, at one batch size.

    Attributes:
        draft: of drafting and taking in.
        widths: tokens per verify pass, ascending.
        verify: seconds of the pass at each width.
    """

    draft: float
    widths: tuple[int, ...]
    verify: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be a table of costs."""
        ascending = all(a < b for a, b in zip(self.widths, self.widths[1:], strict=False))
        if not self.widths or len(self.widths) != len(self.verify) or not ascending:
            raise ConfigError("a cost table needs ascending widths and as many verify seconds")
        if (
            self.draft < 0
            or min(self.verify) <= 0
            or not np.isfinite([*self.verify, self.draft]).all()
        ):
            raise ConfigError("a cost table needs positive seconds")

    def per_round(self, most: int) -> np.ndarray:
        """Return `[most]` float32 seconds of a round that verifies 1, 2, ... `most` tokens."""
        monotone = np.maximum.accumulate(np.asarray(self.verify))
        seconds = np.interp(np.arange(1, most + 1), self.widths, monotone)
        return (self.draft + seconds).astype(np.float32)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for `Engine.cost_table`."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_costs(path: str | Path) -> Costs:
    """Read a table that `Costs.save` wrote.

    Raises:
        ConfigError: no such file, or something else in it.
    """
    try:
        given = json.loads(Path(path).expanduser().read_text())
        return Costs(float(given["draft"]), tuple(given["widths"]), tuple(given["verify"]))
    except OSError as error:
        raise ConfigError(f"Engine.cost_table {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'Engine.cost_table {path}: not a table of "draft", "widths" and "verify" ({error})'
        ) from None


def profile(engine: Engine, capacity: int) -> Costs:
    """Time drafting and the verify pass at each of the engine's widths, on half-full caches."""
    decoder, weights = engine.decoder, engine.weights
    assert decoder.schedule is not None
    state = stages.init_state(decoder, engine.config.concurrency, capacity, engine.cache_dtype)
    half = jnp.full_like(state.lengths, max(capacity // 2, 1))
    state = state.replace(
        cache=state.cache.replace(lengths=half - 1),
        lengths=half,
        budget=jnp.full_like(half, capacity),
        done=jnp.zeros_like(state.done),
    )
    proposal = jax.block_until_ready(_propose(decoder, weights, state))
    verify = [
        _median(lambda w=width: _verify(decoder, weights, state, proposal, w))
        for width in decoder.schedule.widths
    ]
    draft = _median(lambda: _propose(decoder, weights, state))
    # Processes that scheduled by clocks of their own would part ways.
    draft, *verify = json.loads(hosts.of_lead(json.dumps([draft, *verify])))
    return Costs(draft, decoder.schedule.widths, tuple(verify))


def _median(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())  # compiles
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


_propose = functools.partial(jax.jit, static_argnums=0)(stages.propose)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _verify(
    decoder: Decoder, weights: Weights, state: RoundState, proposal: Proposal, size: int
) -> tuple[jax.Array, Any]:
    inputs = stages.verify_inputs(state, proposal)
    batch, length = inputs.shape
    # The tokens as evenly over the lanes as can be: what is timed is their number.
    valid = jnp.minimum(size // batch + (jnp.arange(batch) < size % batch), length)
    out, logits = run_width(decoder.target, weights.target, inputs, valid, state.cache, (), size)
    return logits, out.update
