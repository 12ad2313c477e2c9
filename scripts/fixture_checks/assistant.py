"""Assistant fixtures: rounds of drafts on the keys and states of the sibling target."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.fixture_checks.fixture import Fixture
from scripts.fixture_checks.outcome import Outcome
from specjax import heads, targets
from specjax.core.errors import CheckpointError
from specjax.heads.base import DraftContext, Observation, borrow
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
from specjax.layers.cache.window import WindowKind
from specjax.layers.sampling import Sampling

_DRAFTS = r"^\[\d+,(\d+)\]"
# prefix: (position convention, keys beyond the window that sliding layers see)
_VARIANTS = {
    "draft": ("draft_window", 1),
    "draft_window": ("draft_window", 0),
    "draft_serving": ("draft_serving", 0),
}
_ALL = ("tokens", "logits", "inputs_embeds", "projected_hidden")  # of every variant

# Compiling is all that takes time here.
_compile = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


def compute(fixture: Fixture) -> Outcome:
    """Compute an assistant fixture; its target lies beside it."""
    name = fixture.setting("target", default=fixture.name.removesuffix("_assistant"))
    path = fixture.path.resolve().parent / str(name)
    if path == fixture.path.resolve() or not (path / "config.json").exists():
        raise CheckpointError(f"{fixture.path}: its target is expected beside it, at {path}")
    target, params = targets.load(path)
    head, weights = heads.load(fixture.path, target.info)
    assert isinstance(head, Gemma4MtpHead)
    stored = {**fixture.expected, **fixture.inputs}  # without a manifest nothing tells them apart
    if missing := {"input_ids", "draft.prefix_len"} - set(stored):
        raise CheckpointError(f"{fixture.path}: expected.safetensors lacks {sorted(missing)[0]}")
    tokens = jnp.asarray(stored["input_ids"][:1], jnp.int32)
    prefixes = np.asarray(stored["draft.prefix_len"], np.int32)
    if prefixes.min(initial=1) < 1 or prefixes.max(initial=1) > tokens.shape[1]:
        raise CheckpointError(f"draft.prefix_len must lie in 1..{tokens.shape[1]}")
    count = int(fixture.number_in("draft.tokens", _DRAFTS, 4))
    out: dict[str, np.ndarray] = {}
    for prefix, (position, extra) in _VARIANTS.items():
        placed = dataclasses.replace(
            head, config=dataclasses.replace(head.config, position=position)
        )
        run = _compile(functools.partial(_rounds, target, placed, count, extra))
        made = run(params, weights, tokens, prefixes, stored.get("draft.next_token"))
        kept = made if prefix == "draft" else {key: made[key] for key in _ALL}
        out |= {f"{prefix}.{key}": np.asarray(value) for key, value in kept.items()}
    return Outcome(out)


def _rounds(
    target: targets.Target,
    head: Gemma4MtpHead,
    count: int,
    extra: int,
    params: Any,
    weights: Any,
    tokens: jax.Array,
    prefixes: jax.Array,
    anchors: jax.Array | None,
) -> dict[str, jax.Array]:
    """Draft after each prefix of a text, one prefix a row.

    Args:
        target: the target.
        head: its assistant.
        count: drafts.
        extra: keys that sliding layers see beyond their window.
        params: the target's weights.
        weights: the assistant's.
        tokens: `[1, T]` the text.
        prefixes: `[P]` tokens that the target has processed.
        anchors: `[P, 1]` the token after each prefix, None to take the target's best.
    """
    rows, length = prefixes.shape[0], tokens.shape[1]
    tokens = jnp.broadcast_to(tokens, (rows, length))
    out = target.forward(params, tokens)
    best = jnp.argmax(target.logits(params, out.hidden), axis=-1).astype(jnp.int32)
    anchor = jnp.take_along_axis(best, prefixes[:, None] - 1, axis=1)
    if anchors is not None:
        anchor = jnp.asarray(anchors, jnp.int32)
    borrowed = borrow(target, params)
    seen = Observation(tokens, best, out.hidden, out.taps, prefixes, jnp.zeros_like(prefixes))
    state = head.observe(weights, borrowed, head.init_state(rows, length), seen)
    context = DraftContext(
        anchor=anchor[:, 0],
        position=prefixes,
        tokens=tokens,
        lengths=prefixes + 1,
        sampling=Sampling.of(rows),
        keys=_committed(target, head, out, prefixes, length, extra),
    )
    proposal, steps, logits = head.draft(weights, borrowed, state, context, count, extra)
    return {
        "next_token": anchor,
        "tokens": proposal.tokens,
        "logits": jnp.stack([_filled(x) for x in logits], axis=1),
        "inputs_embeds": jnp.concatenate([s.inputs for s in steps], axis=1),
        "projected_hidden": jnp.concatenate([s.state for s in steps], axis=1),
        "hidden_states": jnp.stack(steps[0].streams, axis=1),
    }


def _committed(
    target: targets.Target,
    head: Gemma4MtpHead,
    out: targets.TargetOut,
    prefixes: jax.Array,
    length: int,
    extra: int,
) -> tuple[Any, ...]:
    """Return cache entries of the prefixes; rings hold what the variant sees."""
    entries = []
    for keys, new in zip(head.keys, target.entries(out.update, head.reads), strict=True):
        cache = keys.cache
        if isinstance(cache, WindowKind):
            cache = dataclasses.replace(cache, window=cache.window + extra)
        empty = cache.empty(prefixes.shape[0], length, "float32")
        entries.append(cache.write(empty, jnp.zeros_like(prefixes), new, prefixes))
    return tuple(entries)


def _filled(logits: jax.Array) -> jax.Array:
    """Put the reference's number where nothing can be drafted: the least logit minus 1."""
    scored = jnp.isfinite(logits)
    least = jnp.min(jnp.where(scored, logits, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scored, logits, least - 1.0)
