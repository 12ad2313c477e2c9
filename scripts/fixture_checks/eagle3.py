"""EAGLE-3 fixtures: the training-time test step by step, its gradients, and two decode rounds."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.fixture_checks.fixture import Fixture
from scripts.fixture_checks.outcome import Outcome
from specjax import heads
from specjax.core.errors import CheckpointError
from specjax.core.params import map_specs
from specjax.heads.base import Borrowed, DraftContext, Observation, TrainBatch
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.eagle3.loss import (
    Compared,
    Rows,
    chain_accuracy,
    chains,
    compare,
    pack,
    rows_of,
    teach,
    unroll,
    weigh,
)
from specjax.heads.eagle3.network import Eagle3Weights, draft_logits, fuse
from specjax.heads.objective_config import Objective, Term
from specjax.heads.vocabulary import kept_ids
from specjax.io.hf import TensorReader
from specjax.layers.norm import rms_norm
from specjax.layers.sampling import Sampling
from specjax.targets.base import TargetInfo

_BUILT = ("llama", "qwen3", "gemma4_text")
_PER_STEP_LOSSES = ("lk_alpha", "lk_lambda")
# Compiling is all that takes time here.
_compile = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A head, its weights and what it borrows."""

    head: Eagle3Head
    params: Eagle3Weights
    borrowed: Borrowed
    final_norm: jax.Array | None

    def with_config(self, **changes: Any) -> _Pair:
        config = dataclasses.replace(self.head.config, **changes)
        return dataclasses.replace(self, head=dataclasses.replace(self.head, config=config))


def compute(fixture: Fixture) -> Outcome:
    """Compute an EAGLE-3 fixture of any of the published layouts."""
    layer = fixture.config.get("transformer_layer_config", fixture.config)
    if layer.get("model_type") not in _BUILT:
        return Outcome(otherwise=f"eagle3 on {layer.get('model_type')!r} is not built here")
    pair, given = _load(fixture), fixture.inputs
    outcome = Outcome()
    if (loss := pair.head.config.objective.terms[0]) not in typing.get_args(Term):
        outcome.otherwise = f"the loss {loss!r} is not built here"
    elif "train.packed.hidden_states" in given:
        outcome.tensors |= packed_training(pair, fixture)
    elif "train.target_hidden_states" in given:
        outcome.tensors |= training(pair, fixture)
    if "infer.context_hidden" in given:
        outcome.tensors |= inference(pair, fixture)
    return outcome


def _load(fixture: Fixture) -> _Pair:
    """Load head and borrowed weights, the recipe taken from the manifest."""
    layer = fixture.config.get("transformer_layer_config", fixture.config)
    named = fixture.config.get("target_layer_ids") or fixture.config.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    layers = fixture.setting("num_target_layers", default=max(named or (9,)) + 3)
    info = TargetInfo(
        family=layer["model_type"],
        hidden=fixture.config.get("target_hidden_size") or layer["hidden_size"],
        vocab=layer["vocab_size"],
        num_layers=layers,
        layer_kinds=("full",) * layers,
        stop_ids=(),
        max_context=layer.get("max_position_embeddings", 2048),
    )
    head, params = heads.load(fixture.path, info)
    lent = {}
    if (file := fixture.path / "target.safetensors").exists():
        reader = TensorReader(file)
        lent = {name.rsplit(".", 2)[-2]: jnp.asarray(reader.read(name)) for name in reader.shapes}
    embedding = lent.get("embed_tokens", params.embedding)
    output = lent.get("lm_head", embedding if "embed_tokens" in lent else params.output)
    if embedding is None or output is None:
        raise CheckpointError(f"{fixture.path}: nothing to borrow from (no target.safetensors)")
    pair = _Pair(head, params, Borrowed(embedding=embedding, output=output), lent.get("norm"))
    # Fixtures are small: keeping activations costs nothing and compiles in half the time.
    return pair.with_config(remat=False, **_recipe(fixture, head))


def _recipe(fixture: Fixture, head: Eagle3Head) -> dict[str, Any]:
    """Return the training switches of the code that a layout comes from."""
    speculators, deepspec = head.layout == "speculators", head.layout == "deepspec"
    default = "mean over counted rows" if speculators else "mean over B*S"
    normaliser = fixture.setting("normaliser", default=default)
    decay = fixture.setting(
        "step_loss_decay", "ttt_step_loss_decay", default=1.0 if speculators else 0.8
    )
    return {
        "ttt_length": int(
            fixture.setting("ttt_length", "ttt_steps", default=3 if speculators else 7)
        ),
        "step_loss_decay": float(decay),
        "objective": Objective(
            terms=(fixture.setting("loss", default="kl_div" if speculators else "soft_ce"),),
            normaliser="all" if "B*S" in normaliser else "counted",
        ),
        "in_vocab_only": not speculators,
        "drop_tail": deepspec,
        "mask_shift": 0,
    }


def _split(states: np.ndarray, taps: int) -> jax.Array:
    """Turn concatenated tapped states `[B, T, n * H]` into `[n, B, T, H]`."""
    parts = states.reshape(*states.shape[:-1], taps, -1)
    return jnp.moveaxis(jnp.asarray(parts, jnp.float32), -2, 0)


def training(pair: _Pair, fixture: Fixture) -> dict[str, np.ndarray]:
    """Unroll on right-padded rows, as the trainer does."""
    given, head = fixture.inputs, pair.head
    tokens = jnp.asarray(given["train.input_ids"], jnp.int32)
    real = given.get("train.attention_mask", np.ones(tokens.shape, np.int32))
    batch = TrainBatch(
        tokens=tokens,
        loss_mask=jnp.asarray(given["train.loss_mask"] > 0),
        lengths=jnp.asarray(real.sum(1), jnp.int32),
        hidden=jnp.asarray(given["train.target_last_hidden_states"], jnp.float32),
        taps=_split(given["train.target_hidden_states"], len(head.taps)),
        key=jax.random.key(0),
    )

    @_compile
    def forward(params: Eagle3Weights, borrowed: Borrowed, batch: TrainBatch) -> dict[str, Any]:
        rows = rows_of(batch, head.config.mask_shift)
        outs = unroll(head, params, borrowed, rows)
        slots = compare(head, params, borrowed, rows, outs)
        lengths = chains(slots)
        return {
            "target_logits": teach(head, borrowed, batch.hidden, None)[0],
            "fused_hidden": fuse(head, params, rows.taps),
            "tau_greedy": lengths["tau_greedy"],
            "tau_probabilistic": lengths["tau_probabilistic"],
            **_named_steps(pair, params, borrowed, outs, slots),
        }

    out = {f"train.{k}": v for k, v in forward(pair.params, pair.borrowed, batch).items()}
    out |= _loss_and_gradients(pair, batch, fixture, "train.")
    for loss in _PER_STEP_LOSSES:
        prefix = f"train.{loss}."
        if any(name.startswith(prefix) for name in fixture.outputs):
            out |= _per_step_loss(pair, batch, fixture, loss, prefix)
    return {name: np.asarray(value) for name, value in out.items()}


def _named_steps(
    pair: _Pair,
    params: Eagle3Weights,
    borrowed: Borrowed,
    outs: list[jax.Array],
    slots: Compared,
) -> dict[str, Any]:
    """Name what each step gives as the references do."""
    out: dict[str, Any] = {}
    term = pair.head.config.objective.terms[0]
    losses = weigh(pair.head, slots)[1]
    for s, hidden in enumerate(outs):
        counted = slots.counted[..., s]
        # Also of rows that have moved past the end of the text, which are never compared.
        logits = draft_logits(pair.head, params, borrowed, hidden)
        parts = {
            "hidden": hidden,
            "logits": logits,
            "pred_ids": jnp.argmax(logits, axis=-1),
            "position_mask": counted,
            "ce": jnp.where(counted, slots.terms[term][..., s], 0.0),
            "accept_rate": jnp.where(counted, slots.accept[..., s], 0.0),
            "correct": slots.correct[..., s],
            "loss": losses[s],
            "accuracy": slots.accuracy[s],
            "mean_accept_rate": slots.acceptance[s],
            "weight": jnp.float32(pair.head.config.step_loss_decay**s),
        }
        out |= {f"step{s}.{name}": value for name, value in parts.items()}
    return out


def _loss_and_gradients(
    pair: _Pair, batch: TrainBatch, fixture: Fixture, prefix: str
) -> dict[str, Any]:
    """Differentiate `head.loss`, the function the trainer differentiates."""

    differentiate = _compile(jax.value_and_grad(pair.head.loss, has_aux=True, allow_int=True))
    (value, metrics), gradients = differentiate(pair.params, pair.borrowed, batch)
    steps = [metrics[f"loss_{s}"] for s in range(pair.head.config.ttt_length)]
    return {
        f"{prefix}loss": value,
        f"{prefix}step_losses": jnp.stack(steps),
        **_named_gradients(pair, gradients, fixture, prefix),
    }


def _named_gradients(
    pair: _Pair, gradients: Eagle3Weights, fixture: Fixture, prefix: str
) -> dict[str, Any]:
    """Name gradients as published, without those of tensors that the manifest freezes."""
    frozen = fixture.setting("frozen")
    trained = pair.head.trainable() if frozen is None else jax.tree.map(lambda _: True, gradients)
    out = {}

    def take(spec: Any, gradient: jax.Array, on: bool) -> None:
        held = any(fnmatch.fnmatch(spec.hf, pattern) for pattern in frozen or ())
        if on and not held and jnp.issubdtype(gradient.dtype, jnp.floating):
            out[f"{prefix}grad.{spec.hf}"] = gradient

    map_specs(take, pair.head.specs(), gradients, trained)
    return out


def _per_step_loss(
    pair: _Pair, batch: TrainBatch, fixture: Fixture, loss: str, prefix: str
) -> dict[str, Any]:
    """Train with a loss on step means instead; its numbers stand in the manifest."""
    said = f"{prefix}step_losses"
    rule = dataclasses.replace(
        pair.head.config.objective,
        terms=(loss,),
        lk_scale=fixture.number_in(said, r"kl_scale ([0-9.]+)", 1.0),
        lk_decay=fixture.number_in(said, r"kl_decay ([0-9.]+)", 3.0),
    )
    return _loss_and_gradients(pair.with_config(objective=rule), batch, fixture, prefix)


def packed_training(pair: _Pair, fixture: Fixture) -> dict[str, np.ndarray]:
    """Unroll on one row of packed documents, speculators' form."""
    given, head = fixture.inputs, pair.head
    if pair.final_norm is None:
        raise CheckpointError(f"{fixture.path}: target.safetensors lacks the target's final norm")
    states = given["train.packed.hidden_states"]
    count = sum(name.endswith(".input_ids") and ".doc" in name for name in given)
    documents = [
        (given[f"train.doc{i}.input_ids"], given[f"train.doc{i}.loss_mask"]) for i in range(count)
    ]
    row = pack(documents, states.shape[1])
    taps = _split(states, len(head.taps))

    def unrolled(params: Eagle3Weights, borrowed: Borrowed) -> tuple[Any, Any, Compared]:
        verifier = jnp.asarray(given["train.packed.verifier_last_hidden_states"], jnp.float32)
        rows = Rows(
            taps=taps,
            tokens=jnp.asarray(row["input_ids"]),
            hidden=rms_norm(verifier, pair.final_norm, head.geometry.eps),
            counted=jnp.asarray(row["loss_mask"]),
            positions=jnp.asarray(row["position_ids"]),
            lengths=jnp.asarray((row["document_ids"] >= 0).sum(1)),
            documents=jnp.asarray(row["document_ids"]),
        )
        outs = unroll(head, params, borrowed, rows)
        slots = compare(head, params, borrowed, rows, outs, across_documents=True)
        return rows, outs, slots

    @_compile
    def forward(params: Eagle3Weights, borrowed: Borrowed) -> dict[str, Any]:
        rows, outs, slots = unrolled(params, borrowed)
        full, conditional = chain_accuracy(slots)
        out = _named_steps(pair, params, borrowed, outs, slots)
        for s in range(len(outs)):
            out[f"step{s}.loss"] *= head.config.step_loss_decay**s
            out |= {f"step{s}.full_acc": full[s], f"step{s}.cond_acc": conditional[s]}
        return {"target_logits": teach(head, borrowed, rows.hidden, kept_ids(params))[0], **out}

    def loss(params: Eagle3Weights) -> jax.Array:
        return weigh(head, unrolled(params, pair.borrowed)[2])[0]

    value, gradients = _compile(jax.value_and_grad(loss, allow_int=True))(pair.params)
    out = {f"train.{k}": v for k, v in forward(pair.params, pair.borrowed).items()}
    out |= {f"train.packed.{k}": v for k, v in row.items()}
    out |= {"train.loss": value, **_named_gradients(pair, gradients, fixture, "train.")}
    return {name: np.asarray(value) for name, value in out.items()}


def inference(pair: _Pair, fixture: Fixture) -> dict[str, np.ndarray]:
    """Draft, take in what the fixture says was accepted, and draft again."""
    given, taps = fixture.inputs, len(pair.head.taps)
    context = np.asarray(given["infer.context_ids"]).reshape(1, -1)
    anchor = np.asarray(given["infer.anchor"]).reshape(1, 1)
    length = context.shape[1]
    seen = _split(given["infer.context_hidden"], taps)
    verified = given.get("infer.verify_hidden")
    drafts = pair.head.config.ttt_length if verified is None else verified.shape[1] - 1
    capacity = length + 2 * (drafts + 1)
    empty = pair.head.init_state(1, capacity)
    following = np.concatenate([context[:, 1:], anchor], axis=1)
    state = _observe(pair, empty, context, following, seen, length, 0)
    out = _draft(pair, state, anchor, length, drafts, "infer.round1")
    if verified is None:
        return out
    tokens = out["infer.round1.tokens"]
    accepted, bonus = int(given["infer.accepted"]), int(given["infer.bonus"])
    inputs = np.concatenate([anchor, tokens], axis=1)
    after = np.concatenate([tokens, [[0]]], axis=1)
    after[:, accepted], after[:, accepted + 1 :] = bonus, 0
    fresh = _split(verified, taps)
    state = _observe(pair, state, inputs, after, fresh, accepted + 1, length)
    newest, position = np.full((1, 1), bonus), length + accepted + 1
    out |= _draft(pair, state, newest, position, drafts, "infer.round2")
    whole = _observe(
        pair,
        empty,
        np.concatenate([context, inputs[:, : accepted + 1]], axis=1),
        np.concatenate([following, after[:, : accepted + 1]], axis=1),
        jnp.concatenate([seen, fresh[:, :, : accepted + 1]], axis=2),
        position,
        0,
    )
    return out | _draft(pair, whole, newest, position, drafts, "infer.round2_nocache")


def _observe(
    pair: _Pair,
    state: Any,
    tokens: np.ndarray,
    following: np.ndarray,
    taps: jax.Array,
    count: int,
    start: int,
) -> Any:
    seen = Observation(
        tokens=jnp.asarray(tokens, jnp.int32),
        next_tokens=jnp.asarray(following, jnp.int32),
        hidden=taps[0],
        taps=taps,
        count=jnp.full(1, count, jnp.int32),
        start=jnp.full(1, start, jnp.int32),
    )
    return _compile(pair.head.observe)(pair.params, pair.borrowed, state, seen)


def _draft(
    pair: _Pair, state: Any, anchor: np.ndarray, position: int, drafts: int, prefix: str
) -> dict[str, np.ndarray]:
    at = jnp.full(1, position, jnp.int32)
    context = DraftContext(
        anchor=jnp.asarray(anchor[0], jnp.int32),
        position=at,
        tokens=jnp.zeros((1, 1), jnp.int32),  # EAGLE-3 looks at no older token
        lengths=at + 1,
        sampling=Sampling.of(1),
    )
    draft = _compile(pair.head.draft, static_argnums=4)
    proposal, hidden, logits = draft(pair.params, pair.borrowed, state, context, drafts)
    return {
        f"{prefix}.tokens": np.asarray(proposal.tokens),
        f"{prefix}.hidden": np.stack(hidden, axis=1),
        f"{prefix}.logits": np.stack(logits, axis=1),
    }
