"""Training of block heads: masks, labels, logits, losses and gradients under each recipe."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.fixture_checks.fixture import Fixture
from specjax.core.errors import CheckpointError
from specjax.core.params import map_specs
from specjax.heads.base import Borrowed
from specjax.heads.dflash.anchors import Blocks, Texts, candidates, lay_out
from specjax.heads.dflash.block_pass import run_blocks, visible_context
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.dflash.loss import (
    acceptance_by_slot,
    block_loss,
    confidence_errors,
    slot_logits,
)
from specjax.heads.dflash.network import DFlashWeights, fuse, sees_slots
from specjax.heads.objective_config import Objective
from specjax.heads.reach import reach
from specjax.io.hf import TensorReader
from specjax.layers import losses
from specjax.layers.norm import rms_norm

Arrays = dict[str, Any]
_FINAL_NORM = "model.norm.weight"
# Compiling is all that takes time here.
_compile = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


def training(
    head: DFlashHead, params: DFlashWeights, borrowed: Borrowed, fixture: Fixture
) -> dict[str, np.ndarray]:
    """Compute the `train.*` tensors of a fixture, {} if it was given none to train on."""
    if "train.anchor_positions" not in fixture.inputs:
        return {}
    if head.config.layout == "speculators":
        out = _packed(head, params, borrowed, fixture)
    else:
        out = _padded(head, params, borrowed, fixture)
    return {name: np.asarray(value) for name, value in out.items()}


def _with(head: DFlashHead, rule: Objective, **changes: Any) -> DFlashHead:
    """Return the head with a recipe; keeping activations costs nothing here and compiles fast."""
    changes |= {"objective": rule, "detach_confidence": False, "remat": False}
    config: DFlashConfig = dataclasses.replace(head.config, **changes)
    return dataclasses.replace(head, config=config)


def _split(states: np.ndarray, taps: int) -> jax.Array:
    """Turn concatenated tapped states `[B, T, n * H]` into `[n, B, T, H]`."""
    parts = states.reshape(*states.shape[:-1], taps, -1)
    return jnp.moveaxis(jnp.asarray(parts, jnp.float32), -2, 0)


# One text per row: DeepSpec and z-lab.


def _padded(
    head: DFlashHead, params: DFlashWeights, borrowed: Borrowed, fixture: Fixture
) -> Arrays:
    given, taps = fixture.inputs, len(head.taps)
    tokens = jnp.asarray(given["train.input_ids"], jnp.int32)
    tapped = _split(given["train.target_hidden_states"], taps)
    last = given.get("train.target_last_hidden_states")
    texts = Texts(
        tokens=tokens,
        loss_mask=jnp.asarray(given["train.loss_mask"] > 0),
        # Without last states there is no teacher, and no term that asks for one.
        hidden=jnp.zeros_like(tapped[0]) if last is None else jnp.asarray(last, jnp.float32),
        taps=tapped,
        positions=jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
    )
    anchors = jnp.asarray(given["train.anchor_positions"], jnp.int32)
    keep = jnp.asarray(given["train.block_keep_mask"], bool)
    head = (
        _deepspec_recipe(head, fixture)
        if head.config.layout == "deepspec"
        else _zlab(head, fixture)
    )
    blocks = lay_out(head, texts, anchors, keep)
    if head.config.layout == "zlab":
        # It reads on behind position 0 where a block is dropped; nothing there counts.
        everywhere = lay_out(head, texts, anchors, keep | True)
        blocks = blocks.replace(labels=everywhere.labels)
    slots = np.repeat(np.asarray(keep), blocks.tokens.shape[2], axis=1)
    out = {
        "anchor_candidates": candidates(head, texts)[:, :-1],
        "position_ids": _positions(texts, blocks),
        "attention_mask": (dense_mask(head, texts, blocks, 0) & slots[..., None])[:, None],
        "prev_token_ids": blocks.previous,
        "target_ids": blocks.labels,
    }
    loss, aux, gradients = _differentiate(head, params, borrowed, texts, blocks)
    out |= _deepspec(head, aux) if head.config.layout == "deepspec" else _zlab_outputs(head, aux)
    out |= {"loss": loss, **_named_gradients(head, gradients, fixture)}
    if head.config.layout == "zlab" and any(".dpace." in name for name in fixture.outputs):
        out |= _zlab_dpace(head, params, borrowed, fixture, texts, blocks)
    return {f"train.{name}": value for name, value in out.items()}


def _deepspec_recipe(head: DFlashHead, fixture: Fixture) -> DFlashHead:
    said = {**fixture.config, **fixture.manifest.get("loss_weights", {})}
    rule = Objective(
        terms=("hard_ce", "l1"),
        factors=(float(said.get("ce_loss_alpha", 1.0)), float(said.get("l1_loss_alpha", 0.0))),
        weighting="dflash_from_anchor",
        gamma=float(said.get("loss_decay_gamma", 4.0)),
        normaliser="weights_eps",
    )
    return _with(
        head,
        rule,
        anchor_rule="pair",
        supervise="prefix",
        confidence_factor=float(said.get("confidence_head_alpha", 1.0)),
    )


def _deepspec(head: DFlashHead, aux: Arrays) -> Arrays:
    slots, found = aux["slots"], aux["losses"]
    out = {
        **{name: aux[name] for name in ("context_features", "backbone_hidden")},
        "draft_logits": aux["logits"],
        "base_logits": aux["base_logits"],
        "eval_mask": slots.counted,
        "loss_weights": found.weights,
        "ce": slots.terms["hard_ce"],
        "l1": slots.terms["l1"],
        "accept_rate": slots.accept,
        "target_top_ids": slots.best,
        "ce_loss": found.parts["hard_ce"],
        "l1_loss": found.parts["l1"],
        "metric.tau_probabilistic": _length(slots.accept, slots.counted),
        "metric.accept_rate_by_slot": acceptance_by_slot(slots),
    }
    if slots.confidence is not None:
        out |= {"confidence_logits": slots.confidence, "confidence_loss": found.confidence}
        errors = confidence_errors(slots, found.weights)
        out |= {f"metric.{name}": value for name, value in errors.items()}
    return out


def _zlab(head: DFlashHead, fixture: Fixture) -> DFlashHead:
    said = fixture.manifest.get("loss", {})
    rule = Objective(weighting="dflash", gamma=float(said.get("gamma", 7.0)), normaliser="weights")
    return _with(head, rule, anchor_rule="room", supervise="label")


def _zlab_outputs(head: DFlashHead, aux: Arrays) -> Arrays:
    slots = aux["slots"]
    right = (slots.pred == slots.label) & slots.counted
    return {
        "backbone_hidden": aux["backbone_hidden"],
        "draft_logits": aux["logits"][0],
        "weight_mask": slots.counted.astype(jnp.float32),
        "ce": slots.terms["hard_ce"],
        "pred_ids": slots.pred,
        "accuracy": jnp.sum(right) / jnp.maximum(jnp.sum(slots.counted), 1),
    }


def _zlab_dpace(
    head: DFlashHead,
    params: DFlashWeights,
    borrowed: Borrowed,
    fixture: Fixture,
    texts: Texts,
    blocks: Blocks,
) -> Arrays:
    alpha = fixture.number_in("train.dpace.weights", r"alpha ([0-9.]+)", 0.5)
    rule = Objective(weighting="dpace", dpace_alpha=alpha, normaliser="rows")
    head = _with(head, rule)
    loss, aux, gradients = _differentiate(head, params, borrowed, texts, blocks)
    slots = aux["slots"]
    suffix = losses.dpace_suffix(slots.terms["hard_ce"], slots.counted, alpha)
    named = {"loss": loss, "weights": suffix, **_named_gradients(head, gradients, fixture)}
    return {f"dpace.{name}": value for name, value in named.items()}


# Several documents packed in one row: speculators.


def _packed(
    head: DFlashHead, params: DFlashWeights, borrowed: Borrowed, fixture: Fixture
) -> Arrays:
    given = fixture.inputs
    texts = _packed_texts(head, fixture)
    anchors = jnp.asarray(given["train.anchor_positions"], jnp.int32)[None]
    valid = jnp.asarray(given["train.anchor_valid"], bool)[None]
    variants = fixture.manifest.get("variants") or [{}]
    heads = [_speculators_recipe(head, variant) for variant in variants]
    # The reference runs padding blocks like others, at position 0, and only leaves them out of
    # the loss; slots behind a document's end are left to the loss mask.
    blocks = lay_out(heads[0], texts, anchors, valid, across_documents=True)
    run = lay_out(heads[0], texts, anchors, valid | True).replace(supervised=blocks.supervised)
    out: Arrays = {}
    for layer in range(head.config.layers):
        kind = "sliding" if head.window(layer) is not None else "full"
        out[f"attention_mask.{kind}_attention"] = dense_mask(heads[0], texts, run, layer)[0]
    for i, (variant, trained) in enumerate(zip(variants, heads, strict=True)):
        loss, aux, gradients = _differentiate(trained, params, borrowed, texts, run)
        slots = aux["slots"]
        out |= {
            "draft_logits": aux["logits"][0],
            "target_ids": slots.best[0],
            "aligned_loss_mask": slots.counted[0],
            "tv": 1.0 - slots.accept[0],
        }
        if slots.confidence is not None:
            out["confidence_logits"] = slots.confidence[0]
        found = {"loss": loss, **_named_gradients(trained, gradients, fixture)}
        if trained.config.objective.weighting == "dpace":
            found["dpace_weights"] = aux["losses"].weights[0]
        metrics = _speculators_metrics(trained, aux, str(variant.get("loss", "")))
        found |= {f"metric.{name}": value for name, value in metrics.items()}
        out |= {f"variant{i}.{name}": value for name, value in found.items()}
    return {f"train.{name}": value for name, value in out.items()}


def _packed_texts(head: DFlashHead, fixture: Fixture) -> Texts:
    given, file = fixture.inputs, fixture.path / "target.safetensors"
    reader = TensorReader(file) if file.exists() else None
    if reader is None or _FINAL_NORM not in reader.shapes:
        raise CheckpointError(f"{fixture.path}: target.safetensors lacks {_FINAL_NORM}")
    last = jnp.asarray(given["train.packed.verifier_last_hidden_states"], jnp.float32)
    norm = jnp.asarray(reader.read(_FINAL_NORM))
    return Texts(
        tokens=jnp.asarray(given["train.packed.input_ids"], jnp.int32),
        loss_mask=jnp.asarray(given["train.packed.loss_mask"], bool),
        hidden=rms_norm(last, norm, head.geometry.eps),
        taps=_split(given["train.packed.hidden_states"], len(head.taps)),
        positions=jnp.asarray(given["train.packed.position_ids"], jnp.int32),
        documents=jnp.asarray(given["train.packed.document_ids"], jnp.int32),
    )


def _speculators_recipe(head: DFlashHead, variant: dict[str, Any]) -> DFlashHead:
    said = variant.get("loss", "kl_div")
    mixed = json.loads(said) if isinstance(said, str) and said.startswith("{") else said
    shares = mixed if isinstance(mixed, dict) else {str(mixed): 1.0}
    decay = "dflash_from_anchor" if head.config.sample_from_anchor else "dflash"
    default = Objective()
    rule = Objective(
        terms=tuple(shares),
        factors=tuple(float(share) for share in shares.values()),
        weighting=variant.get("weight", decay),
        gamma=float(variant.get("gamma", default.gamma)),
        base=float(variant.get("base", default.base)),
        dpace_alpha=float(variant.get("dpace_alpha", default.dpace_alpha)),
        lk_eta=float(variant.get("lk_hybrid_eta", default.lk_eta)),
        normaliser="counted_per_row",
    )
    factor = float(variant.get("confidence_head_alpha", 1.0))
    return _with(head, rule, anchor_rule="room", supervise="slot", confidence_factor=factor)


def _speculators_metrics(head: DFlashHead, aux: Arrays, said: str) -> Arrays:
    slots, found, first = aux["slots"], aux["losses"], head.first_slot
    mask = slots.counted.astype(jnp.float32)
    right = jnp.where(slots.counted, slots.pred == slots.best, 0.0)
    by_slot = right.sum((0, 1)) / jnp.maximum(mask.sum((0, 1)), 1)
    count = jnp.maximum(mask.sum(), 1)
    out = {
        "loss": found.total,
        "full_acc": right.sum() / count,
        "eal": jnp.sum(jnp.cumprod(by_slot[first:])),
        "accept_rate": jnp.sum(slots.accept * mask) / count,
        "accept_len": _length(slots.accept[..., first:], slots.counted[..., first:]),
    }
    if said.startswith("{"):
        out |= {f"{name}_loss": value for name, value in found.parts.items()}
    if slots.confidence is not None:
        out |= {"confidence_loss": found.confidence, **confidence_errors(slots, mask)}
    return out


# What all recipes share.


def _differentiate(
    head: DFlashHead, params: DFlashWeights, borrowed: Borrowed, texts: Texts, blocks: Blocks
) -> tuple[jax.Array, Arrays, DFlashWeights]:
    """Return (loss, what it was made of, gradients) by the functions that the trainer calls."""

    def run(
        params: DFlashWeights, borrowed: Borrowed, texts: Texts, blocks: Blocks
    ) -> tuple[jax.Array, Arrays]:
        found, slots = block_loss(head, params, borrowed, texts, blocks)
        hidden = run_blocks(head, params, borrowed, texts, blocks)
        base, logits = slot_logits(head, params, borrowed, hidden, blocks.previous)
        return found.total, {
            "losses": found,
            "slots": slots,
            "context_features": fuse(head, params, texts.taps),
            "backbone_hidden": hidden,
            "base_logits": base,
            "logits": logits,
        }

    differentiate = _compile(jax.value_and_grad(run, has_aux=True, allow_int=True))
    (value, aux), gradients = differentiate(params, borrowed, texts, blocks)
    return value, aux, gradients


def dense_mask(head: DFlashHead, texts: Texts, blocks: Blocks, layer: int) -> np.ndarray:
    """Return `[B, N b, S + N b]` which keys each slot sees, as references spell it out."""
    batch, count, size = blocks.tokens.shape
    context = visible_context(head, texts, layer, blocks.anchors.T)  # [N, B, b or 1, S]
    context = jnp.broadcast_to(context, (count, batch, size, texts.tokens.shape[1]))
    own = np.kron(np.eye(count, dtype=int), np.asarray(sees_slots(head, layer), int)) > 0
    left = np.moveaxis(np.asarray(context), 0, 1).reshape(batch, count * size, -1)
    return np.concatenate([left, np.broadcast_to(own, (batch, *own.shape))], axis=2)


def _positions(texts: Texts, blocks: Blocks) -> jax.Array:
    flat = blocks.positions.reshape(blocks.positions.shape[0], -1)
    return jnp.concatenate([texts.positions, flat], axis=1).astype(jnp.int32)


def _named_gradients(head: DFlashHead, gradients: DFlashWeights, fixture: Fixture) -> Arrays:
    """Name gradients as published, without those of tensors that are frozen."""
    frozen, out = fixture.setting("frozen", default=()), {}

    def take(spec: Any, gradient: jax.Array, on: bool) -> None:
        held = any(fnmatch.fnmatch(spec.hf, pattern) for pattern in frozen)
        if on and not held and jnp.issubdtype(gradient.dtype, jnp.floating):
            out[f"grad.{spec.hf}"] = gradient

    map_specs(take, head.specs(), gradients, head.trainable())
    return out


def _length(share: jax.Array, counted: jax.Array) -> jax.Array:
    return 1.0 + jnp.sum(reach(share, counted, counted.any(-1)))
