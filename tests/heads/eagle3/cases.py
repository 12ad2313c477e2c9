"""Fixtures and tiny heads that the EAGLE-3 tests share."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.heads.base import Borrowed, DraftContext, Observation, TrainBatch
from specjax.heads.eagle3 import layouts
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head, Eagle3State
from specjax.heads.eagle3.network import Eagle3Weights
from specjax.heads.objective_config import Objective
from specjax.io.hf import TensorReader
from specjax.layers.blocks.dense import BlockConfig
from specjax.layers.rope import RopeConfig
from specjax.layers.sampling import Sampling
from specjax.targets.base import TargetInfo

# Tests run each program once or twice: compile it quickly rather than well.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})

FIXTURES = Path(__file__).parents[2] / "fixtures"

# The conventions of each reference, which its fixture was computed under.
CONVENTIONS: dict[str, dict[str, Any]] = {
    "eagle3_llama": {"objective": Objective(terms=("soft_ce",), normaliser="all")},
    "eagle3_qwen3": {
        "objective": Objective(terms=("soft_ce",), normaliser="all"),
        "drop_tail": True,
        "remat": False,
    },
    "eagle3_speculators": {
        "ttt_length": 4,
        "step_loss_decay": 1.0,
        "objective": Objective(terms=("kl_div",), normaliser="counted"),
        "mask_shift": 1,
        "in_vocab_only": False,
        "remat": False,
    },
}


def info(**changes: Any) -> TargetInfo:
    """Facts of the target behind the fixtures."""
    facts = TargetInfo("llama", 32, 160, 12, ("full",) * 12, (2,), 512)
    return dataclasses.replace(facts, **changes)


@dataclasses.dataclass(frozen=True)
class Case:
    """A fixture: head, weights, what it borrows, and the stored tensors."""

    head: Eagle3Head
    params: Eagle3Weights
    borrowed: Borrowed
    tensors: dict[str, np.ndarray]
    target: dict[str, np.ndarray]

    def taps(self, joined: np.ndarray) -> jax.Array:
        """Split `[B, S, n * H]` into `[n, B, S, H]`."""
        count = len(self.head.taps)
        split = jnp.asarray(joined).reshape(*joined.shape[:2], count, -1)
        return jnp.moveaxis(split, 2, 0)

    def batch(self) -> TrainBatch:
        """Return the stored training batch."""
        x = self.tensors
        return TrainBatch(
            tokens=jnp.asarray(x["train.input_ids"]),
            loss_mask=jnp.asarray(x["train.loss_mask"]) > 0,
            lengths=jnp.asarray(x["train.attention_mask"].sum(1)),
            hidden=jnp.asarray(x["train.target_last_hidden_states"]),
            taps=self.taps(x["train.target_hidden_states"]),
            key=jax.random.key(0),
        )


def read(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a file."""
    reader = TensorReader(path)
    return {name: reader.read(name) for name in reader.shapes}


def case(name: str) -> Case:
    """Load a fixture under its reference's conventions."""
    root = FIXTURES / name
    head, params = layouts.load(root, info())
    config = dataclasses.replace(head.config, **CONVENTIONS[name])
    file = root / "target.safetensors"
    target = read(file) if file.exists() else {}
    borrowed = Borrowed(
        embedding=jnp.asarray(target.get("model.embed_tokens.weight", params.embedding)),
        output=jnp.asarray(target.get("lm_head.weight", params.output)),
    )
    head = dataclasses.replace(head, config=config)
    return Case(head, params, borrowed, read(root / "expected.safetensors"), target)


def agree(name: str, got: Any, expected: np.ndarray, *, gradient: bool = False) -> None:
    """Compare as fixtures are judged: 1e-4 of the largest, 2e-3 for gradients, integers exact."""
    got = np.asarray(got)
    assert got.shape == expected.shape, name
    if expected.dtype.kind in "ib":
        assert np.array_equal(got, expected), name
        return
    largest = np.abs(expected).max()
    allowed = 2e-3 * largest if gradient else 1e-4 * max(1.0, largest)
    assert np.abs(got - expected).max() <= allowed, name


VOCAB, HIDDEN = 40, 16


def tiny_block(**changes: Any) -> BlockConfig:
    """Sizes of a tiny target's layer."""
    rope = RopeConfig(theta=10000.0, dims=8)
    block = BlockConfig(hidden=HIDDEN, heads=2, kv_heads=1, head_dim=8, mlp=24, eps=1e-5, rope=rope)
    return dataclasses.replace(block, **changes)


def tiny_borrowed(seed: int = 7, vocab: int = VOCAB, hidden: int = HIDDEN) -> Borrowed:
    """Weights of a tiny target that heads may use."""
    rng = np.random.default_rng(seed)
    return Borrowed(
        embedding=jnp.asarray(rng.normal(size=(vocab, hidden)), jnp.float32),
        output=jnp.asarray(rng.normal(size=(vocab, hidden)), jnp.float32),
    )


def tiny(
    kept: np.ndarray | None = None, **config: Any
) -> tuple[Eagle3Head, Eagle3Weights, Borrowed]:
    """Return a fresh head for a tiny target of six layers, with weights that do something."""
    facts = info(hidden=HIDDEN, vocab=VOCAB, num_layers=6, max_context=128)
    settings = Eagle3Config(taps=(1, 3, 5), **{"remat": False, **config})
    size = None if kept is None else len(kept)
    head = Eagle3Head.for_target(facts, tiny_block(), settings, size)
    borrowed = tiny_borrowed()
    params = head.init(jax.random.key(3), borrowed, kept)
    louder = jax.tree.map(lambda x: x * 12 if x.ndim == 2 else x, (params.fc, params.layer))
    return head, dataclasses.replace(params, fc=louder[0], layer=louder[1]), borrowed


def tiny_batch(lengths: list[int], width: int, seed: int = 0) -> TrainBatch:
    """Return random texts; what stands in the padding is garbage."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    at = np.arange(width)[None]
    return TrainBatch(
        tokens=jnp.asarray(rng.integers(0, VOCAB, (rows, width)), jnp.int32),
        loss_mask=jnp.asarray((at >= 2) & (at < np.asarray(lengths)[:, None])),
        lengths=jnp.asarray(lengths, jnp.int32),
        hidden=jnp.asarray(rng.normal(size=(rows, width, HIDDEN)), jnp.float32),
        taps=jnp.asarray(rng.normal(size=(3, rows, width, HIDDEN)), jnp.float32),
        key=jax.random.key(0),
    )


def context(state: Eagle3State, sampling: Sampling | None = None) -> DraftContext:
    """Return the context of a round that follows what a state has taken in."""
    batch = state.lengths.shape[0]
    return DraftContext(
        anchor=jnp.zeros(batch, jnp.int32),
        position=state.lengths,
        tokens=jnp.zeros((batch, 1), jnp.int32),
        lengths=state.lengths + 1,
        sampling=sampling or Sampling.of(batch),
    )


def observation(next_tokens: jax.Array, taps: jax.Array, count: Any, start: Any) -> Observation:
    """Return what the target saw at the positions before `next_tokens` `[B, T]`."""
    batch, length = next_tokens.shape
    return Observation(
        tokens=jnp.zeros((batch, length), jnp.int32),
        next_tokens=next_tokens.astype(jnp.int32),
        hidden=jnp.zeros((batch, length, taps.shape[-1])),
        taps=taps,
        count=jnp.asarray(count, jnp.int32),
        start=jnp.asarray(start, jnp.int32),
    )
