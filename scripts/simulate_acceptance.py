"""Expected mean acceptance length of a head by width, without decoding, beside measured ones.

    python scripts/simulate_acceptance.py --target DIR --head DIR --data answers.jsonl

One teacher-forced pass over the answers gives every width at once, but takes each of their places
for the start of a round. Real rounds start behind a rejection, at harder places; and a head that
goes on from its own drafts sees them, not the text. The gap to the measured column is that.
The answers should be the target's own, greedily decoded, or the columns differ by the data too.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from specjax.cli import guarded


def run(args: argparse.Namespace, console: Console) -> None:
    """Load, simulate, decode and print.

    Raises:
        SpecJaxError: a target, head or data that cannot be used.
    """
    from specjax import heads, targets
    from specjax.data.dataset import Batches
    from specjax.heads.base import borrow
    from specjax.training import rows
    from specjax.training.config import DataConfig, TrainerConfig
    from specjax.training.simulate import simulate

    target, weights = targets.load(args.target, args.dtype)
    lent = borrow(target, weights)
    head, params = heads.find(args.head, args.target, target.info, args.dtype, borrowed=lent)
    data = DataConfig(files=args.data, max_length=args.max_length, shuffle=False)
    config = TrainerConfig(
        target=args.target, out="-", data=data, batch_size=args.batch_size, target_dtype=args.dtype
    )
    some = rows.load(config, target.info.stop_ids).train.rows[: args.rows]
    texts = Batches(some, args.batch_size, data.buckets(), shuffle=False)
    batches = (batch for batch, _ in texts.iterate(epochs=1))
    shown = track(batches, "simulating", texts.steps_per_epoch, console=console, transient=True)
    found = simulate(target, weights, head, params, shown)
    measured = _decode(args, target, weights, head, params, texts.rows, len(found.greedy))
    table = Table(title="mean acceptance length, the bonus token included", box=None)
    for name in ("drafts", "simulated, greedy", "simulated, sampled", "decoded, greedy", "gap"):
        table.add_column(name, justify="right")
    for k, greedy in enumerate(found.greedy):
        real = measured.get(k + 1)
        table.add_row(
            str(k + 1),
            f"{greedy:.3f}",
            "-" if found.sampled is None else f"{found.sampled[k]:.3f}",
            "-" if real is None else f"{real:.3f}",
            "-" if real is None else f"{real / greedy - 1:+.1%}",
        )
    console.print(table)
    console.print(
        f"simulated at {found.places} places of {len(texts.rows)} texts; decoded: the openings of"
        f" {args.prompts} of them, {args.new_tokens} tokens each",
        soft_wrap=True,
    )


def _decode(
    args: argparse.Namespace,
    target: Any,
    weights: Any,
    head: Any,
    params: Any,
    rows: Any,
    most: int,
) -> dict[int, float]:
    """Return the mean acceptance length decoded at each width asked for."""
    from specjax.decode import EngineConfig, Request
    from specjax.training.decoding import MEASURED, Probe, opening

    prompts = [prompt for row in rows if (prompt := opening(row))][: args.prompts]
    requests = tuple(Request(prompt, args.new_tokens) for prompt in prompts)
    limit = min(most, head.max_tokens or most)
    widths = {int(w) for w in args.widths.split(",")} if args.widths else {1, 2, 4, limit}
    out = {}
    for width in sorted(w for w in widths if 0 < w <= limit and requests):
        engine = EngineConfig(num_speculative_tokens=width, concurrency=min(8, len(requests)))
        probe = Probe(target, head, requests, engine, args.dtype)
        out[width] = probe.measure(weights, params)[MEASURED]
    return out


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="directory or hub id")
    parser.add_argument("--head", required=True, help="directory or hub id, or mtp")
    parser.add_argument("--data", required=True, help="sources of answers, with commas between")
    parser.add_argument("--rows", type=int, default=64, help="texts simulated (default 64)")
    parser.add_argument("--prompts", type=int, default=16, help="of these decoded (default 16)")
    parser.add_argument("--new-tokens", type=int, default=128, help="decoded of each (default 128)")
    parser.add_argument("--widths", help="drafts to decode with (default 1,2,4 and the most)")
    parser.add_argument("--batch-size", type=int, default=4, help="texts of a pass (default 4)")
    parser.add_argument("--max-length", type=int, default=512, help="longest text (default 512)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args(argv)

    def body() -> int:
        run(args, Console(width=100))
        return 0

    return guarded(body)


if __name__ == "__main__":
    sys.exit(main())
