"""Target fixtures: full, padded and chunked passes, and greedy decoding by the engine."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.fixture_checks import mtp
from scripts.fixture_checks.fixture import Fixture
from scripts.fixture_checks.outcome import Outcome
from specjax import targets
from specjax.core.errors import CheckpointError
from specjax.decode import Engine, EngineConfig, Request
from specjax.decode import round as engine_round
from specjax.layers.sampling import Sampling
from specjax.targets import Target

_PREFILL = r"(\d+)-token cached prefill"
_NEW_TOKENS = r"^\[\d+,(\d+)\]"


# Compiling is all that takes time here.
_compile = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


@functools.partial(_compile, static_argnums=(0, 4))
def _forward(
    target: Target, params: Any, tokens: jax.Array, valid: jax.Array, taps: tuple[int, ...]
) -> tuple[targets.TargetOut, jax.Array]:
    out = target.forward(params, tokens, valid, taps=taps)
    return out, target.logits(params, out.hidden)


def compute(fixture: Fixture) -> Outcome:
    """Compute a target fixture."""
    kind = targets.text_config(fixture.config).get("model_type")
    if kind not in targets.FAMILIES:
        return Outcome(otherwise=f"model_type {kind!r} is not built here")
    target, params = targets.load(fixture.path)
    given, out = fixture.inputs, {}
    if "input_ids" in given:
        tokens = _tokens(given["input_ids"], target)
        out |= full_pass(target, params, tokens)
        if mtp.wanted(fixture, target):
            out |= mtp.compute(fixture, target, params, out)
        prefix = int(fixture.number_in("chunk_logits", _PREFILL, 16))
        if 0 < prefix < tokens.shape[1]:
            out["chunk_logits"] = chunked(target, params, tokens, prefix)
    if "padded_input_ids" in given and "attention_mask" in given:
        tokens = _tokens(given["padded_input_ids"], target)
        out |= padded(target, params, tokens, given["attention_mask"] != 0)
    if "greedy_prompt" in given:
        count = int(fixture.number_in("greedy_ids", _NEW_TOKENS, 16))
        out |= greedy(target, params, _tokens(given["greedy_prompt"], target), count)
    return Outcome(out, otherwise="this family has no such tensor here")


def _tokens(ids: np.ndarray, target: Target) -> np.ndarray:
    if ids.ndim != 2 or ids.min(initial=0) < 0 or ids.max(initial=0) >= target.info.vocab:
        raise CheckpointError(
            f"token ids of shape {ids.shape} are not [batch, length] ids below {target.info.vocab}"
        )
    return ids.astype(np.int32)


def full_pass(target: Target, params: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Run one pass without a cache, every residual stream tapped."""
    batch, length = tokens.shape
    taps = tuple(range(target.info.num_layers + 1))
    out, logits = _forward(target, params, tokens, jnp.full((batch,), length), taps)
    return {
        "logits": np.asarray(logits),
        "hidden_states": np.asarray(out.taps),
        "final_hidden": np.asarray(out.hidden),
    }


def padded(
    target: Target, params: Any, tokens: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
    """Bring the real tokens of each row to its left, run, and put the results back."""
    order = np.argsort(~mask, axis=1, kind="stable")
    packed = np.take_along_axis(tokens, order, axis=1)
    _, logits = _forward(target, params, packed, jnp.asarray(mask.sum(1), jnp.int32), ())
    positions = np.zeros(mask.shape, np.int32)
    spread = np.zeros(logits.shape, np.float32)
    for row, (to, real) in enumerate(zip(order, mask.sum(1), strict=True)):
        positions[row, to[:real]] = np.arange(real)
        spread[row, to[:real]] = logits[row, :real]
    return {"padded_logits": spread, "padded_position_ids": positions}


def chunked(target: Target, params: Any, tokens: np.ndarray, prefix: int) -> np.ndarray:
    """Commit a prefix to the cache, then run the rest on top of it."""
    batch, length = tokens.shape

    @_compile
    def run(params: Any, head: jax.Array, tail: jax.Array) -> jax.Array:
        cache = target.init_cache(batch, length)
        update = target.forward(params, head, cache=cache).update
        cache = target.commit(cache, update, jnp.full((batch,), prefix, jnp.int32))
        return target.logits(params, target.forward(params, tail, cache=cache).hidden)

    return np.asarray(run(params, tokens[:, :prefix], tokens[:, prefix:]))


def greedy(target: Target, params: Any, prompts: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Decode greedily past any stop token: ids by the engine, logits by its round's own pass."""
    engine = Engine(target, params, config=EngineConfig(concurrency=len(prompts)), stop_ids=())
    requests = [Request(tuple(map(int, row)), max_new_tokens=count) for row in prompts]
    ids = [result.token_ids for result in engine.generate(requests)]
    decoder, weights = engine.decoder, engine.weights

    @_compile
    def round_logits(
        weights: engine_round.Weights, state: engine_round.RoundState
    ) -> tuple[jax.Array, engine_round.RoundState]:
        proposal = engine_round.propose(decoder, weights, state)
        width, _ = engine_round.schedule(decoder, weights, state, proposal)
        _, _, logits = engine_round.forward(decoder, weights, state, proposal, width)
        return logits[:, 0], engine_round.one_round(decoder, weights, state)

    state = _before_last_token(decoder, weights, prompts, count)
    logits = []
    for _ in range(count):
        step, state = round_logits(weights, state)
        logits.append(np.asarray(step))
    return {"greedy_ids": np.asarray(ids, np.int32), "greedy_logits": np.stack(logits, axis=1)}


def _before_last_token(
    decoder: engine_round.Decoder, weights: engine_round.Weights, prompts: np.ndarray, count: int
) -> engine_round.RoundState:
    """Return a state whose anchors are the prompts' last tokens, all before them prefilled."""
    batch, length = prompts.shape
    state = engine_round.init_state(decoder, batch, length + count, "float32").replace(
        tokens=jnp.pad(jnp.asarray(prompts), ((0, 0), (0, count))),
        budget=jnp.full((batch,), count, jnp.int32),
        sampling=Sampling.of(batch),
    )
    valid = jnp.full((batch,), length - 1, jnp.int32)
    following = jnp.asarray(prompts[:, -1])
    # One column more than needed, so that a prompt of one token has a chunk too.
    prefill = _compile(engine_round.prefill_chunk, static_argnums=0)
    return prefill(decoder, weights, state, jnp.asarray(prompts), valid, following)
