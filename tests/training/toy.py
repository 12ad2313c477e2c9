"""A tiny target, a head with a one-line loss, and data: all that the trainer asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax import targets
from specjax.core.params import init_params
from specjax.data.chat import Encoded
from specjax.data.dataset import Batches
from specjax.heads.base import Borrowed, TrainBatch
from specjax.targets.base import Target
from specjax.training.config import DataConfig, OptimConfig, TrainerConfig

VOCAB, HIDDEN = 97, 32
TARGET = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class ToyHead:
    """Predicts the next token from two tapped states; a map and a bias stay as they are."""

    mask_id: int = 90
    poison: int = -1
    taps: tuple[int, ...] = (1, 3)
    reads: ClassVar[tuple[int, ...]] = ()
    name: ClassVar[str] = "toy"
    traces: ClassVar[list[tuple[int, ...]]] = []

    def init(self, seed: int = 0) -> dict[str, Any]:
        w = jax.random.normal(jax.random.key(seed), (VOCAB, 2 * HIDDEN)) * 0.1
        bias = jnp.linspace(0.0, 1.0, VOCAB)
        return {"w": w, "bias": bias, "map": jnp.arange(VOCAB, dtype=jnp.int32)}

    def trainable(self) -> dict[str, bool]:
        return {"w": True, "bias": False, "map": False}

    def loss(
        self, params: dict[str, Any], borrowed: Borrowed, batch: TrainBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        self.traces.append(batch.tokens.shape)
        x = jnp.concatenate(list(batch.taps), axis=-1).astype(params["w"].dtype)
        logits = (x @ params["w"].T + params["bias"])[:, :-1].astype(jnp.float32)
        labels = params["map"][batch.tokens[:, 1:]]
        terms = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
        mask = batch.loss_mask[:, 1:]
        noise = 1 + 0.01 * jax.random.uniform(batch.key)  # shows that the key is restored
        loss = noise * jnp.where(mask, terms, 0).sum() / jnp.maximum(mask.sum(), 1)
        loss = jnp.where((batch.tokens == self.poison).any(), jnp.nan, loss)
        return loss, {"acceptance": jnp.exp(-loss), "pair": jnp.stack([loss, 2 * loss])}


def make_target(seed: int = 1) -> tuple[Target, Any]:
    target = targets.from_config(TARGET)
    return target, init_params(target.specs(), jax.random.key(seed), scale=0.2)


def make_rows(count: int = 24, seed: int = 0, longest: int = 14) -> list[Encoded]:
    """Rows of 4 to `longest` tokens; the second half of each is the answer."""
    rng = np.random.default_rng(seed)
    rows = []
    for n in rng.integers(4, longest + 1, count):
        ids = rng.integers(3, 90, n).astype(np.int32)
        rows.append(Encoded(ids, np.arange(n) >= n // 2))
    return rows


def make_batches(rows: list[Encoded] | None = None, batch_size: int = 4) -> Batches:
    return Batches(rows or make_rows(), batch_size, (8, 16), seed=3)


def make_config(folder: Path, **changes: Any) -> TrainerConfig:
    """A run in `folder`, whose target and data files exist for the fingerprint's sake."""
    target = folder / "target"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text("{}")
    (folder / "data.jsonl").write_text("{}\n")
    given: dict[str, Any] = {
        "target": str(target),
        "out": str(folder / "run"),
        "data": DataConfig(files=str(folder / "data.jsonl"), max_length=16, lengths=(8, 16)),
        "optim": OptimConfig(lr=1e-2),
        "steps": 8,
        "batch_size": 4,
        "save_every": 2,
        "log_every": 4,
        "compute_dtype": "float32",
        "target_dtype": "float32",
    }
    return TrainerConfig(**{**given, **changes})
