"""How long does an optimiser step take, in units of a matrix product on the same machine?

    python scripts/bench_train.py [--heads eagle3 dspark] [--steps 30]

Shapes and recipe of a published trainer's CPU measurement (DeepSpec): hidden 256, 4 heads,
2 key-value heads, vocabulary 4096, 4 texts of 256 tokens, random features made beforehand.
A step is the head's loss with its metrics, gradients, clipping and AdamW, in float32. After every
step a float32 2048 x 2048 product is timed (the calibration; torch's where torch is installed,
else numpy's), so that a machine that others use gives a steady ratio.
"""

import argparse
import importlib.util
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from specjax import targets
from specjax.heads.base import Borrowed, TrainBatch
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.objective_config import Objective
from specjax.training.config import OptimConfig
from specjax.training.optim import optimizer
from specjax.training.partition import Partition

HIDDEN, VOCAB, ROWS, LENGTH = 256, 4096, 4, 256
_MASK_TOKEN, _TAPS = VOCAB - 1, (2, 4, 6)
_TARGET = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 768,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip


def eagle3() -> Any:
    """Return the EAGLE-3 head: seven steps, every position in the divisor."""
    info = targets.from_config(_TARGET).info
    assert info.draft_block is not None
    recipe = Objective(terms=("soft_ce",), normaliser="all")
    settings = Eagle3Config(
        taps=_TAPS, ttt_length=7, step_loss_decay=0.8, objective=recipe, drop_tail=True, remat=False
    )
    return Eagle3Head.for_target(info, info.draft_block, settings)


def dspark() -> Any:
    """Return the DSpark head: two layers, 32 blocks of 7 a text, Markov and confidence heads."""
    recipe = Objective(
        terms=("hard_ce", "l1"),
        factors=(0.1, 0.9),
        weighting="dflash_from_anchor",
        normaliser="weights_eps",
    )
    settings = DFlashConfig(
        taps=_TAPS,
        block_size=7,
        sample_from_anchor=True,
        mask_token_id=_MASK_TOKEN,
        layers=2,
        markov_rank=64,
        confidence=True,
        confidence_with_markov=True,
        num_anchors=32,
        objective=recipe,
        detach_confidence=False,
        remat=False,
        layout="deepspec",
    )
    return DFlashHead.for_target(targets.from_config(_TARGET).info, settings)


HEADS: dict[str, Callable[[], Any]] = {"eagle3": eagle3, "dspark": dspark}
PUBLISHED = {"eagle3": (32.67, "11 to 14"), "dspark": (3.267, "2.9 to 3.1")}


def data(seed: int = 0) -> tuple[Borrowed, TrainBatch]:
    """Return random weights of a target and a random batch, as the published measurement has."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    borrowed = Borrowed(normal(VOCAB, HIDDEN, scale=0.02), normal(VOCAB, HIDDEN, scale=0.02))
    batch = TrainBatch(
        tokens=jnp.asarray(rng.integers(0, VOCAB - 1, (ROWS, LENGTH)), jnp.int32),
        loss_mask=jnp.ones((ROWS, LENGTH), bool),
        lengths=jnp.full(ROWS, LENGTH, jnp.int32),
        hidden=normal(ROWS, LENGTH, HIDDEN, scale=20.0),
        taps=normal(len(_TAPS), ROWS, LENGTH, HIDDEN),
        key=jax.random.key(0),
    )
    return borrowed, batch


def stepper(head: Any, borrowed: Borrowed, batch: TrainBatch) -> Callable[[], float]:
    """Return a function that takes one optimiser step and returns its loss."""
    params = head.init(jax.random.key(1), borrowed)
    partition = Partition.of(params, head.trainable())
    trained, frozen = partition.split(params)
    rule = optimizer(OptimConfig(lr=6e-4, weight_decay=0.0, clip=1.0, schedule="cosine"), 1000)

    def step(trained: Any, state: Any, count: jax.Array, batch: TrainBatch) -> Any:
        def loss(trained: Any) -> Any:
            return head.loss(partition.join(trained, frozen), borrowed, given)

        given = batch.replace(key=jax.random.fold_in(batch.key, count))  # type: ignore[attr-defined]
        (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        updates, state = rule.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state, count + 1, value, metrics

    run = jax.jit(step, donate_argnums=(0, 1))
    held = [jax.tree.map(jnp.array, trained), rule.init(trained), jnp.int32(0)]

    def once() -> float:
        *held[:], value, _ = run(*held, batch)
        return float(jax.block_until_ready(value))

    return once


def product() -> tuple[str, Callable[[], object]]:
    """Return (library, function) of the calibration's matrix product on two threads."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(2)
        square = torch.randn(2048, 2048)
        return "torch", lambda: square @ square
    rows = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    return "numpy", lambda: rows @ rows


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    library, calibrate = product()
    table = Table(box=None, pad_edge=False)
    for name in ("head", "first loss", "published", "step ms", "min", "calibration ms", "min",
                 "ratio", "of minima", "published ratio", "tokens/s"):  # fmt: skip
        table.add_column(name, justify="left" if name == "head" else "right")
    borrowed, batch = data()
    for name in args.heads:
        step = stepper(HEADS[name](), borrowed, batch)
        first = step()
        for _ in range(3):
            step(), calibrate()
        steps, products = [], []
        for _ in range(args.steps):
            steps.append(timed(step))
            calibrate()  # the step's threads still spin for a moment
            products.append(timed(calibrate))
        middle, unit = statistics.median(steps), statistics.median(products)
        ratio = statistics.median(s / p for s, p in zip(steps, products, strict=True))
        loss, published = PUBLISHED[name]
        table.add_row(
            name, f"{first:.3f}", str(loss), f"{1e3 * middle:.0f}", f"{1e3 * min(steps):.0f}",
            f"{1e3 * unit:.1f}", f"{1e3 * min(products):.1f}", f"{ratio:.1f}",
            f"{min(steps) / min(products):.1f}", published, f"{ROWS * LENGTH / middle:.0f}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(f"python scripts/bench_train.py {shlex.join(sys.argv[1:])}", style="dim")
    console.print(table)
    console.print(f"calibration: float32 2048 x 2048 product of {library}, after every step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
