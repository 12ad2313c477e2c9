"""Verification fixtures, computed by the parts that `specjax.verify` and a round are made of."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from scripts.fixture_checks.fixture import Fixture
from scripts.fixture_checks.outcome import Outcome
from specjax.core.errors import CheckpointError
from specjax.layers.sampling import Sampling, overlap, processed_probs
from specjax.verify import contains_stop, cut_at_stop, tally
from specjax.verify.emit import prefix_length
from specjax.verify.rejection import accept_mask, accept_probability, next_distribution

_NEEDED = ("temperature", "target_logits", "draft_logits", "draft_tokens", "uniforms")


def compute(fixture: Fixture) -> Outcome:
    """Compute every case of a verification fixture."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    for name, value in fixture.inputs.items():
        case, _, part = name.rpartition(".")
        cases.setdefault(case, {})[part] = value
    outcome = Outcome()
    for case, given in cases.items():
        missing = [name for name in _NEEDED if name not in given]
        if missing:
            raise CheckpointError(f"{fixture.path}: case {case!r} lacks {', '.join(missing)}")
        prefix = f"{case}." if case else ""
        outcome.tensors |= {prefix + name: value for name, value in one_case(given).items()}
    return outcome


def one_case(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Judge the drafts of one case with the uniform numbers it states."""
    stops = np.asarray(given.get("stop_token_ids", ()), np.int32)
    out = _judge(*(jnp.asarray(given[name])[None] for name in _NEEDED), jnp.asarray(stops))
    return {name: np.asarray(value[0]) for name, value in out.items()}


@jax.jit
def _judge(
    temperature: jax.Array,
    target_logits: jax.Array,
    draft_logits: jax.Array,
    drafts: jax.Array,
    uniforms: jax.Array,
    stops: jax.Array,
) -> dict[str, jax.Array]:
    sampling = Sampling.of(1, temperature=temperature)
    p, q = processed_probs(target_logits, sampling), processed_probs(draft_logits, sampling)
    width = jnp.full(1, drafts.shape[1], jnp.int32)
    probability = accept_probability(p, q, drafts)
    matched = prefix_length(accept_mask(probability, uniforms, width))
    # The reference counts drafts; the token that would follow them stands as a 0 behind.
    tokens = jnp.pad(drafts, ((0, 0), (0, 1)))
    emitted = cut_at_stop(tokens, matched, stops, width + 1, jnp.zeros(1, bool))
    accepted, counted = tally(matched, width, emitted)
    return {
        "target_probs": p,
        "draft_probs": q,
        "accept_prob": probability,
        "accepted": accepted,
        "next_distribution": next_distribution(p, q, drafts, accepted, width),
        "terminated_by_stop": contains_stop(tokens, matched, stops),
        "effective_proposal_length": counted,
        "expected_accept_rate": overlap(p[:, :-1], q),
    }
