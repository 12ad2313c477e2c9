"""The MTP tensors of target fixtures: a forced pass over texts, and drafts behind prefixes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.fixture_checks.fixture import Fixture
from specjax import heads
from specjax.core.errors import CheckpointError
from specjax.heads.base import Borrowed, DraftContext, Observation, borrow
from specjax.heads.mtp.head import MtpHead
from specjax.heads.mtp.loss import forced_pass
from specjax.heads.mtp.network import MtpWeights, carry, draft_logits, module_norm
from specjax.layers.sampling import Sampling
from specjax.targets import Target

_DRAFTS = r"^\[\d+,(\d+)\]"
_PREFIXES = "mtp.draft.prefix_len"
# Compiling is all that takes time here.
_compile = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


@dataclasses.dataclass(frozen=True)
class _Text:
    """Row 0 of the fixture behind each of its prefixes: tokens `[N, L]`, states `[N, L, H]`."""

    tokens: np.ndarray
    hidden: np.ndarray
    lengths: np.ndarray


def wanted(fixture: Fixture, target: Target) -> bool:
    """Whether a target fixture has MTP modules and anything is asked of them."""
    asked = any(name.startswith("mtp.") for name in (*fixture.inputs, *fixture.outputs))
    return bool(target.info.draft_modules) and asked


def compute(
    fixture: Fixture, target: Target, params: Any, found: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Compute the MTP tensors of a target fixture.

    Args:
        fixture: the fixture; its directory holds the modules.
        target: the target.
        params: its weights.
        found: the target's own `final_hidden` and `logits` over `input_ids`.
    """
    head, modules = heads.load(fixture.path, target.info)
    tokens = fixture.inputs["input_ids"].astype(np.int32)
    hidden, lent = found["final_hidden"], borrow(target, params)
    forced = _forced(head, modules, lent, tokens, hidden)
    out = {f"mtp.{name}": forced[name] for name in ("hidden", "hidden_prenorm", "logits")}
    zeroed = _forced(_with(head, zero_first=True), modules, lent, tokens, hidden)
    out |= {f"mtp.zero_first.{name}": zeroed[name] for name in ("hidden", "logits")}
    if _PREFIXES not in fixture.inputs:
        return out
    lengths = np.asarray(fixture.inputs[_PREFIXES]).reshape(-1)
    if lengths.min(initial=1) < 1 or lengths.max(initial=1) > tokens.shape[1]:
        raise CheckpointError(f"{_PREFIXES} {lengths.tolist()} outside 1..{tokens.shape[1]}")
    text, following = _behind(tokens[0], hidden[0], found["logits"][0], lengths)
    count = int(fixture.number_in("mtp.draft.tokens", _DRAFTS, 3))
    first = MtpWeights(modules.modules[:1])  # module 0 alone, again and again
    for kind, carried in (("draft", "normed"), ("draft_prenorm", "raw")):
        alone = _with(head, carried=carried, modules=1)
        drafts = _drafts(alone, first, lent, text, count, pieces=2)
        out |= {f"mtp.{kind}.{name}": value for name, value in drafts.items()}
        out[f"mtp.{kind}.next_token"] = following[:, None]
    whole = _drafts(head, modules, lent, text, head.modules, pieces=1)
    return out | {f"mtp.library_draft.{name}": whole[name] for name in ("tokens", "logits")}


def _with(head: MtpHead, **changes: Any) -> MtpHead:
    return dataclasses.replace(head, config=dataclasses.replace(head.config, **changes))


def _forced(
    head: MtpHead, modules: MtpWeights, lent: Borrowed, tokens: np.ndarray, hidden: np.ndarray
) -> dict[str, np.ndarray]:
    """Run module 0 over the texts, every index given the target's state and the next token."""

    @_compile
    def run(modules: MtpWeights, lent: Borrowed, states: Any, following: Any) -> dict[str, Any]:
        first = modules.modules[0]
        out = forced_pass(head, first, lent, states, following)
        return {
            "hidden_prenorm": out,
            "hidden": module_norm(head, out, first.norm),
            "logits": draft_logits(head, first, lent, out),
        }

    found = run(modules, lent, hidden[:, :-1], tokens[:, 1:])
    return {name: np.asarray(value) for name, value in found.items()}


def _behind(
    tokens: np.ndarray, hidden: np.ndarray, logits: np.ndarray, lengths: np.ndarray
) -> tuple[_Text, np.ndarray]:
    """Return (a row per prefix, with the target's own next token behind it; these tokens)."""
    following = logits[lengths - 1].argmax(-1).astype(np.int32)
    rows = np.tile(np.append(tokens, 0), (len(lengths), 1)).astype(np.int32)
    rows[np.arange(len(lengths)), lengths] = following
    states = np.tile(hidden, (len(lengths), 1, 1))
    return _Text(rows, states, lengths.astype(np.int32)), following


def _drafts(
    head: MtpHead, modules: MtpWeights, lent: Borrowed, text: _Text, count: int, pieces: int
) -> dict[str, np.ndarray]:
    """Observe each row's prefix in pieces, then draft; what is behind the prefix is not counted."""
    rows, width = text.tokens.shape[0], text.hidden.shape[1]
    state = head.init_state(rows, width)
    observe = _compile(head.observe)
    done = np.zeros(rows, np.int32)
    for piece in range(pieces):
        until = text.lengths * (piece + 1) // pieces
        at = np.minimum(done[:, None] + np.arange(width)[None], width - 1)
        seen = Observation(
            tokens=jnp.asarray(np.take_along_axis(text.tokens, at, axis=1)),
            next_tokens=jnp.asarray(np.take_along_axis(text.tokens, at + 1, axis=1)),
            hidden=jnp.asarray(np.take_along_axis(text.hidden, at[..., None], axis=1)),
            taps=jnp.zeros((0, rows, width, head.hidden)),
            count=jnp.asarray(until - done),
            start=jnp.asarray(done),
        )
        state, done = observe(modules, lent, state, seen), until
    lengths = jnp.asarray(text.lengths)
    context = DraftContext(
        anchor=jnp.asarray(text.tokens[np.arange(rows), text.lengths]),
        position=lengths,
        tokens=jnp.asarray(text.tokens),
        lengths=lengths + 1,
        sampling=Sampling.of(rows),
    )

    @_compile
    def draft(modules: MtpWeights, lent: Borrowed, state: Any) -> dict[str, Any]:
        proposal, outs, logits = head.draft(modules, lent, state, context, count)
        last = head.modules - 1
        carried = [
            carry(head, modules.modules[min(k, last)], out.astype(jnp.float32))
            for k, out in enumerate(outs)
        ]
        return {
            "tokens": proposal.tokens,
            "hidden": jnp.stack(carried, axis=1),
            "logits": jnp.stack(logits, axis=1),
        }

    return {name: np.asarray(value) for name, value in draft(modules, lent, state).items()}
