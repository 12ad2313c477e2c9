"""What a training step of each head needs in memory, with logits in pieces and all at once.

    python scripts/bench_memory.py [--vocab 150000] [--length 2048]

Loss and gradients are compiled for shapes alone; nothing is allocated. Printed is what the compiled
program needs beside weights and inputs, with logits in pieces (`heads.pieces`) and with all at
once. Anchored heads draw as many slots as there are tokens.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from specjax import targets
from specjax.core.params import shapes
from specjax.heads import pieces
from specjax.heads.base import Borrowed, TrainBatch
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead
from specjax.heads.objective_config import Objective
from specjax.targets.base import TargetInfo

HIDDEN = 64
SOFT = Objective(terms=("soft_ce",), normaliser="counted")
KINDS = ("eagle3", "dflash", "dspark", "mtp", "gemma4_mtp")


def info_of(vocab: int) -> TargetInfo:
    """Return the facts of a narrow target with a large vocabulary."""
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": HIDDEN, "num_hidden_layers": 4,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "eos_token_id": 2,
    }  # fmt: skip
    return targets.from_config(config).info


def make(kind: str, info: TargetInfo, anchors: int = 256) -> Any:
    """Return a small head whose loss compares whole distributions."""
    if kind == "eagle3":
        assert info.draft_block is not None
        return Eagle3Head.for_target(info, info.draft_block, Eagle3Config(taps=(1, 2, 3), mlp=64))
    if kind == "mtp":
        return MtpHead.for_target(info, MtpConfig(objective=SOFT))
    if kind == "gemma4_mtp":
        return Gemma4MtpHead.for_target(info, Gemma4MtpConfig(layers=2, hidden=64, steps=3))
    spark = kind == "dspark"
    settings = DFlashConfig(
        taps=(1, 3),
        block_size=8,
        sample_from_anchor=spark,
        mask_token_id=3,
        layers=2,
        mlp=64,
        markov_rank=16 if spark else 0,
        confidence=spark,
        num_anchors=anchors,
        objective=Objective(terms=("hard_ce", "l1")),
    )
    return DFlashHead.for_target(info, settings)


def batch_of(head: Any, info: TargetInfo, length: int) -> tuple[Borrowed, TrainBatch]:
    """Return the shapes of a batch of one text."""

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def whole(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    keys = [info.key_layers[i].cache for i in head.reads]  # type: ignore[union-attr]
    batch = TrainBatch(
        tokens=whole(1, length),
        loss_mask=jax.ShapeDtypeStruct((1, length), jnp.bool_),
        lengths=whole(1),
        hidden=floats(1, length, info.hidden),
        taps=floats(len(head.taps), 1, length, info.hidden),
        key=jax.eval_shape(lambda: jax.random.key(0)),
        keys=tuple(
            (floats(1, k.kv_heads, length, k.k_dim), floats(1, k.kv_heads, length, k.v_dim))
            for k in keys
        ),
    )
    return Borrowed(floats(info.vocab, info.hidden), floats(info.vocab, info.hidden)), batch


def temporaries(kind: str, vocab: int, length: int, elements: int = pieces.ELEMENTS) -> int:
    """Return the bytes that loss and gradients need beside weights and inputs.

    Args:
        kind: of `KINDS`.
        vocab: size of the vocabulary.
        length: tokens of the text.
        elements: numbers of logits at one time; as many as there are makes a plain loss.
    """
    info = info_of(vocab)
    head = make(kind, info)
    borrowed, batch = batch_of(head, info, length)
    trained = head.trainable() if hasattr(head, "trainable") else None
    loss = jax.value_and_grad(head.loss, has_aux=True, allow_int=True)

    def step(params: Any, borrowed: Borrowed, batch: TrainBatch) -> Any:
        (value, _), gradients = loss(params, borrowed, batch)
        if trained is not None:  # training never makes the gradient of a frozen table
            gradients = jax.tree.map(lambda g, on: g if on else None, gradients, trained)
        return value, gradients

    before, pieces.ELEMENTS = pieces.ELEMENTS, elements
    try:
        lowered = jax.jit(step).lower(shapes(head.specs()), borrowed, batch)
    finally:
        pieces.ELEMENTS = before
    return lowered.compile().memory_analysis().temp_size_in_bytes


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    console, mib = Console(width=100), 1 << 20
    table = Table(
        title=f"loss and gradients, one text of {args.length}, vocabulary {args.vocab}: MiB",
        box=None,
    )
    for name in ("head", "in pieces", "plain", "share"):
        table.add_column(name, justify="left" if name == "head" else "right")
    for kind in KINDS:
        cut = temporaries(kind, args.vocab, args.length)
        whole = temporaries(kind, args.vocab, args.length, sys.maxsize)
        table.add_row(kind, f"{cut / mib:.0f}", f"{whole / mib:.0f}", f"{cut / whole:.2f}")
    console.print(table)
    logits = 4 * args.length * args.vocab / mib
    console.print(f"float32 logits of all positions over the whole vocabulary, once: {logits:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
