"""Show which part of each conversation a head is trained on.

    python scripts/show_masks.py --target TARGET_DIR --data answers.jsonl --rows 3

Prints conversations decoded from their token ids, what is supervised in green and underlined
(between >> and << where there is no terminal), then what became of all rows.
"""

import argparse
import sys

import numpy as np
from rich.console import Console
from rich.text import Text

from specjax.cli import guarded
from specjax.training import rendering


def show(args: argparse.Namespace, console: Console) -> None:
    """Print the first rows and the counts.

    Raises:
        SpecJaxError: a tokenizer or data that cannot be used.
    """
    from transformers import AutoTokenizer

    from specjax.data.conversations import load_chats
    from specjax.data.sources import split_list
    from specjax.io.hf import read_config, read_stop_ids, resolve

    root = resolve(args.target)
    tokenizer = AutoTokenizer.from_pretrained(root)
    stops = tuple(read_stop_ids(root, read_config(root)))
    encoder = rendering.encoder_of(args, tokenizer, stops)
    rows, counts = load_chats(split_list(args.data), encoder, args.max_length)
    for number, row in enumerate(rows[: args.rows], 1):
        said = int(row.mask.sum())
        console.rule(f"usable row {number}: {said} of {len(row.ids)} tokens supervised")
        text = Text()
        edges = np.flatnonzero(np.diff(row.mask)) + 1
        for part, flags in zip(np.split(row.ids, edges), np.split(row.mask, edges), strict=True):
            shown = tokenizer.decode(part, clean_up_tokenization_spaces=False)
            if flags[0] and not console.is_terminal:
                shown = f">>{shown}<<"
            text.append(shown, style="green underline" if flags[0] else "dim")
        console.print(text, soft_wrap=True)
    console.rule()
    lines = [
        f"{counts.used} rows usable, {counts.cut} of them cut; {counts.supervised} of "
        f"{counts.tokens} tokens supervised",
        *(f"left out: {number} {reason}" for reason, number in counts.left_out().items()),
        *counts.places,
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", required=True, help="Hugging Face directory or hub id")
    parser.add_argument("--data", required=True, help="sources, with commas between")
    parser.add_argument("--rows", type=int, default=3, help="how many to print (default 3)")
    parser.add_argument("--max-length", type=int, help="cut conversations, as training will")
    rendering.add_arguments(parser)
    args = parser.parse_args(argv)

    def run() -> int:
        show(args, Console())
        return 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
