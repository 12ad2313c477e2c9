"""DFlash and DSpark fixtures: two decode rounds here, training in `blocks_training`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.fixture_checks.blocks_training import training
from scripts.fixture_checks.fixture import Fixture
from scripts.fixture_checks.outcome import Outcome
from specjax import heads
from specjax.core.errors import CheckpointError
from specjax.heads.base import Borrowed, DraftContext, Observation
from specjax.heads.dflash.head import DFlashHead, DFlashState
from specjax.heads.dflash.network import DFlashWeights
from specjax.io.hf import TensorReader
from specjax.layers.sampling import Sampling
from specjax.targets.base import TargetInfo
from specjax.verify.schedule import survival

# Compiling is all that takes time here.
_compile = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


@dataclasses.dataclass(frozen=True)
class Pair:
    """A head, its weights and what it borrows."""

    head: DFlashHead
    params: DFlashWeights
    borrowed: Borrowed


def compute(fixture: Fixture) -> Outcome:
    """Compute a fixture of a block head, of any of the published layouts."""
    pair, outcome = load(fixture), Outcome()
    outcome.tensors |= training(pair.head, pair.params, pair.borrowed, fixture)
    if "infer.context_hidden" in fixture.inputs:
        outcome.tensors |= inference(pair, fixture)
    return outcome


def load(fixture: Fixture) -> Pair:
    """Load the head and what it borrows."""
    head, params = heads.load(fixture.path, target_of(fixture))
    lent = {}
    if (file := fixture.path / "target.safetensors").exists():
        reader = TensorReader(file)
        lent = {name.rsplit(".", 2)[-2]: jnp.asarray(reader.read(name)) for name in reader.shapes}
    embedding = lent.get("embed_tokens", params.embedding)
    output = lent.get("lm_head", embedding if "embed_tokens" in lent else params.output)
    if embedding is None or output is None:
        raise CheckpointError(f"{fixture.path}: nothing to borrow from (no target.safetensors)")
    return Pair(head, params, Borrowed(embedding=embedding, output=output))


def target_of(fixture: Fixture) -> TargetInfo:
    """Return the facts of the target behind a fixture, as far as its head tells them."""
    config = fixture.config
    layer = config.get("transformer_layer_config", config)
    nested = config.get("dflash_config", {})
    ids = nested.get("target_layer_ids") or config.get("target_layer_ids")
    ids = ids or config.get("aux_hidden_state_layer_ids") or (9,)
    layers = fixture.setting("num_target_layers", default=max(ids) + 3)
    hidden = config.get("target_hidden_size") or layer["hidden_size"]
    cap = config.get("final_logit_softcapping") or nested.get("final_logit_softcapping")
    # Only Gemma's targets scale embeddings, and their heads are the ones with a cap.
    gemma = cap is not None or str(layer["model_type"]).startswith("gemma")
    return TargetInfo(
        family=layer["model_type"],
        hidden=hidden,
        vocab=layer["vocab_size"],
        num_layers=layers,
        layer_kinds=("full",) * layers,
        stop_ids=(),
        max_context=layer.get("max_position_embeddings", 2048),
        embed_scale=hidden**0.5 if gemma else 1.0,
        softcap=cap,
    )


def _split(states: np.ndarray, taps: int) -> jax.Array:
    """Turn concatenated tapped states `[B, T, n * H]` into `[n, B, T, H]`."""
    parts = states.reshape(*states.shape[:-1], taps, -1)
    return jnp.moveaxis(jnp.asarray(parts, jnp.float32), -2, 0)


def inference(pair: Pair, fixture: Fixture) -> dict[str, np.ndarray]:
    """Draft, take in what the fixture says was accepted, and draft again."""
    given, taps = fixture.inputs, len(pair.head.taps)
    anchor = int(given["infer.anchor"])
    seen = _split(given["infer.context_hidden"], taps)
    length, verified = seen.shape[2], given.get("infer.verify_hidden")
    drafts = pair.head.max_tokens if verified is None else verified.shape[1] - 1
    empty = pair.head.init_state(1, length + 2 * (drafts + 1))
    state = _observe(pair, empty, seen, length, 0)
    out = _draft(pair, state, anchor, length, drafts, "infer.round1")
    if verified is None:
        return out
    count = int(given["infer.accepted"]) + 1
    newest = int(given["infer.bonus"])
    fresh = _split(verified, taps)
    state = _observe(pair, state, fresh, count, length)
    out |= _draft(pair, state, newest, length + count, drafts, "infer.round2")
    everything = jnp.concatenate([seen, fresh[:, :, :count]], axis=2)
    whole = _observe(pair, empty, everything, length + count, 0)
    return out | _draft(pair, whole, newest, length + count, drafts, "infer.round2_nocache")


@functools.partial(_compile, static_argnums=0)
def _taken_in(
    head: DFlashHead,
    params: DFlashWeights,
    borrowed: Borrowed,
    state: DFlashState,
    seen: Observation,
) -> DFlashState:
    return head.observe(params, borrowed, state, seen)


def _observe(pair: Pair, state: DFlashState, taps: jax.Array, count: int, start: int) -> Any:
    blank = jnp.zeros(taps.shape[1:3], jnp.int32)  # a block head looks at no committed token
    seen = Observation(
        tokens=blank,
        next_tokens=blank,
        hidden=taps[0],
        taps=taps,
        count=jnp.full(1, count, jnp.int32),
        start=jnp.full(1, start, jnp.int32),
    )
    return _taken_in(pair.head, pair.params, pair.borrowed, state, seen)


@functools.partial(_compile, static_argnums=(0, 5))
def _drafted(
    head: DFlashHead,
    params: DFlashWeights,
    borrowed: Borrowed,
    state: DFlashState,
    context: DraftContext,
    drafts: int,
) -> Any:
    return head.draft(params, borrowed, state, context, drafts)


def _draft(
    pair: Pair, state: DFlashState, anchor: int, position: int, drafts: int, prefix: str
) -> dict[str, np.ndarray]:
    at = jnp.full(1, position, jnp.int32)
    context = DraftContext(
        anchor=jnp.full(1, anchor, jnp.int32),
        position=at,
        tokens=jnp.zeros((1, 1), jnp.int32),
        lengths=at + 1,
        sampling=Sampling.of(1),
    )
    proposal, done = _drafted(pair.head, pair.params, pair.borrowed, state, context, drafts)
    out = {
        "tokens": proposal.tokens,
        "hidden": done.hidden,
        "base_logits": done.base_logits,
        "logits": done.logits,
    }
    if done.confidence_logits is not None:
        out["confidence_logits"] = done.confidence_logits
        whole = jnp.ones(proposal.confidence.shape, bool)
        out["survival"] = survival(proposal.confidence, whole)
    return {f"{prefix}.{name}": np.asarray(value) for name, value in out.items()}
