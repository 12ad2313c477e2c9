"""Build a draft vocabulary from the answers a head will be trained on.

    python scripts/draft_vocab.py --target TARGET_DIR --data answers.jsonl --size 8192 \
        --output draft_vocab.safetensors

Keeps the most frequent tokens that the assistant says (the target's stop tokens always), then
those of the prompt files given by --fill (answers repeat the words of their questions), then low
ids, and writes ``d2t`` (int64 offsets) and ``t2d`` (bool), as released heads carry them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from specjax.cli import guarded
from specjax.training import rendering


def count_prompts(tokenizer: Any, files: Sequence[str], vocab: int) -> np.ndarray:
    """Count the tokens of all turns of prompt files."""
    from specjax.data.prompts import load_prompts

    counts = np.zeros(vocab, np.int64)
    for file in files:
        for prompt in load_prompts(file):
            for turn in prompt.turns:
                ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
                np.add.at(counts, ids, 1)
    return counts


def build(args: argparse.Namespace) -> str:
    """Write the vocabulary and return the line to print."""
    from transformers import AutoTokenizer

    from specjax.data import draft_vocab
    from specjax.data.conversations import load_chats
    from specjax.io.hf import read_config, read_stop_ids, resolve

    output, size = args.output, args.size
    root = resolve(args.target)
    config = read_config(root)
    stops = read_stop_ids(root, config)
    tokenizer = AutoTokenizer.from_pretrained(root)
    encoder = rendering.encoder_of(args, tokenizer, tuple(stops))
    rows, counts = load_chats(args.data, encoder, args.max_length)
    total = config.get("text_config", config)["vocab_size"]
    occurrences = draft_vocab.count_supervised(rows, total)
    second = count_prompts(tokenizer, args.fill, total) if args.fill else None
    vocab = draft_vocab.choose(occurrences, size, stops, second)
    draft_vocab.save(vocab, output)
    left_out = ", ".join(f"{number} {reason}" for reason, number in counts.left_out().items())
    return (
        f"{output}: {size} of {len(vocab.t2d)} tokens cover {vocab.coverage:.2%} of "
        f"{counts.supervised} answer tokens ({int((occurrences > 0).sum())} distinct) in "
        f"{counts.used} rows; left out: {left_out or 'none'}"
    )


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", required=True, help="Hugging Face directory or hub id")
    parser.add_argument("--data", required=True, nargs="+", help="conversations, as for training")
    parser.add_argument("--size", type=int, default=8192, help="tokens to keep (default 8192)")
    parser.add_argument("--output", required=True, type=Path, help="safetensors file to write")
    parser.add_argument("--fill", nargs="+", default=[], help="prompt files whose tokens come next")
    parser.add_argument("--max-length", type=int, help="cut conversations, as training will")
    rendering.add_arguments(parser)
    args = parser.parse_args(argv)

    def run() -> int:
        Console().print(build(args), markup=False, soft_wrap=True)
        return 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
