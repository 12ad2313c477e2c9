"""Is our baseline honest? Decoding without speculation, against transformers on torch.

    python scripts/bench_decode.py --target TARGET_DIR [--head HEAD_DIR]

It measures, each comparison in alternation on this machine:

- decoding by our engine and by `transformers.generate` (torch), each in float32 and bfloat16,
  compared in each side's faster dtype, at batch 1 and 8;
- a decode round that verifies 8 tokens against one that verifies 1, at batch 1 in bfloat16;
- where the time of a round goes: target, head, the rest;
- which fraction of the memory bandwidth (measured here too) a decode step attains.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import heads, targets
from specjax.core.errors import SpecJaxError
from specjax.decode import Engine, EngineConfig, Request
from specjax.evaluation import shares
from specjax.heads.base import Borrowed, DraftContext, NullHead, Observation, Proposal, borrow
from specjax.io.hf import resolve

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class FreeHead:
    """Drafts token 0 at no cost: a round with it is a verify pass of K + 1 tokens."""

    name: ClassVar[str] = "free"
    taps: ClassVar[tuple[int, ...]] = ()
    reads: ClassVar[tuple[int, ...]] = ()
    max_tokens: ClassVar[int | None] = None

    def specs(self) -> Any:
        """It has no weights."""
        return ()

    def init_state(self, batch: int, capacity: int, dtype: str) -> Any:
        """It has no state."""
        return ()

    def observe(self, params: Any, borrowed: Borrowed, state: Any, obs: Observation) -> Any:
        """Nothing to take in."""
        return state

    def propose(
        self, params: Any, borrowed: Borrowed, state: Any, context: DraftContext, num: int
    ) -> Proposal:
        """Propose zeros."""
        return Proposal(tokens=jnp.zeros((context.anchor.shape[0], num), jnp.int32))


@dataclasses.dataclass
class Side:
    """One way to decode a batch, and its seconds per token step, one per repeat.

    Attributes:
        run: decodes once; returns seconds of decoding alone, and with the prompts.
        decode: seconds of decoding, prompts excluded.
        whole: seconds with the prompts.
    """

    run: Callable[[], tuple[float, float]]
    decode: list[float] = dataclasses.field(default_factory=list)
    whole: list[float] = dataclasses.field(default_factory=list)


def alternate(sides: dict[str, Side], repeats: int) -> None:
    """Warm every side up once, then run all of them in turn."""
    for side in sides.values():
        side.run()
    for repeat in range(repeats):
        for side in list(sides.values())[:: 1 if repeat % 2 == 0 else -1]:
            decode, whole = side.run()
            side.decode.append(decode)
            side.whole.append(whole)


def our_side(engine: Engine, requests: Sequence[Request]) -> Side:
    """Decode with our engine."""

    def run() -> tuple[float, float]:
        engine.generate(requests)
        assert engine.times is not None
        return engine.times.decode, engine.times.decode + engine.times.prefill

    return Side(run)


def torch_side(path: Path, dtype: str, requests: Sequence[Request], threads: int) -> Side:
    """Decode with transformers; its prompt time is that of generating one token."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None  # the same number of tokens on both sides
    prompts = torch.tensor([r.prompt_ids for r in requests])
    mask = torch.ones_like(prompts)

    def seconds(new: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompts, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        spent = time.perf_counter() - start
        assert out.shape[1] == prompts.shape[1] + new
        return spent

    def run() -> tuple[float, float]:
        first, whole = seconds(1), seconds(requests[0].max_new_tokens)
        return whole - first, whole

    return Side(run)


def bandwidth(size: int, threads: int) -> float:
    """Return bytes per second of reading an array of `size` bytes once, best of several."""
    chunks = np.array_split(np.ones(size // 4, np.float32), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for read in (np.max, lambda chunk: chunk.dot(chunk)) * 5:
            start = time.perf_counter()
            list(pool.map(read, chunks))
            best = min(best, time.perf_counter() - start)
    return size / best


def bytes_per_step(engine: Engine, requests: Sequence[Request]) -> int:
    """Return bytes that one decode step reads: weights and the whole of the caches."""
    target, params = engine.decoder.target, engine.weights.target
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if target.output_weights(params) is not target.input_embedding(params):
        weights -= target.input_embedding(params).nbytes  # only the rows looked up are read
    state = engine.prefill(requests[0], engine.config.capacity)
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache.layers))
    return weights + caches * len(requests)


def median_ratio(top: Sequence[float], bottom: Sequence[float]) -> float:
    """Return the median of paired ratios."""
    return statistics.median(a / b for a, b in zip(top, bottom, strict=True))


class Bench:
    """A target in both dtypes, random prompts, and the tables."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the target."""
        self.args = args
        self.path = resolve(args.target)
        self.console = Console()
        loaded = {dtype: targets.load(self.path, dtype) for dtype in DTYPES}
        self.target = loaded["float32"][0]
        self.params = {dtype: params for dtype, (_, params) in loaded.items()}

    def requests(self, batch: int) -> list[Request]:
        """Return `batch` random prompts of equal length."""
        ids = np.random.default_rng(0).integers(
            self.target.info.vocab, size=(batch, self.args.prompt_tokens)
        )
        return [Request(tuple(map(int, row)), self.args.new_tokens) for row in ids]

    def engine(
        self, dtype: str, batch: int, head: Any = None, head_params: Any = (), drafts: int = 0
    ) -> Engine:
        """Return an engine that never stops early, with caches just large enough."""
        room = -(-(self.args.prompt_tokens + self.args.new_tokens) // 64) * 64
        config = EngineConfig(
            num_speculative_tokens=drafts, concurrency=batch, capacity=room, rounds_per_call=10**6
        )
        head = NullHead() if head is None else head
        return Engine(self.target, self.params[dtype], head, head_params, config, stop_ids=())

    def against_torch(self, batch: int) -> None:
        """Print the comparison with transformers, and ours with the bandwidth."""
        requests, threads = self.requests(batch), self.args.threads
        engines = {dtype: self.engine(dtype, batch) for dtype in DTYPES}
        sides = {f"ours {dtype}": our_side(e, requests) for dtype, e in engines.items()}
        for dtype in () if self.args.no_torch else DTYPES:
            sides[f"torch {dtype}"] = torch_side(self.path, dtype, requests, threads)
        alternate(sides, self.args.repeats)

        steps = self.args.new_tokens - 1  # the first token comes from the prompt's pass
        table = Table(title=f"Decoding, batch {batch}", title_justify="left", box=None)
        for name in ("side", "ms / step", "tokens / s", "with prompts", "of bandwidth"):
            table.add_column(name, justify="left" if name == "side" else "right")
        for name, side in sides.items():
            step = statistics.median(side.decode) / steps
            end_to_end = batch * self.args.new_tokens / statistics.median(side.whole)
            share = ""
            if name.startswith("ours"):
                size = bytes_per_step(engines[name.split()[1]], requests)
                share = f"{size / step / bandwidth(size, threads):.0%}"
            row = (f"{1e3 * step:.1f}", f"{batch / step:.1f}", f"{end_to_end:.1f}", share)
            table.add_row(name, *row)
        self.console.print(table)
        best = {
            kind: min(
                (side for name, side in sides.items() if name.startswith(kind)),
                key=lambda side: statistics.median(side.decode),
            )
            for kind in ("ours", "torch")[: 1 if self.args.no_torch else 2]
        }
        if "torch" in best:
            decode = median_ratio(best["torch"].decode, best["ours"].decode)
            whole = median_ratio(best["torch"].whole, best["ours"].whole)
            self.console.print(
                f"ours is {decode:.2f} times as fast as torch in decoding,"
                f" {whole:.2f} times with prompts (each side in its faster dtype)\n"
            )

    def verify_pass(self, tokens: int = 8) -> None:
        """Print what verifying `tokens` costs compared with one, in the engine's own loop."""
        requests = self.requests(1)
        engines = {
            "1": self.engine("bfloat16", 1),
            str(tokens): self.engine("bfloat16", 1, FreeHead(), (), tokens - 1),
        }
        sides = {name: Side(self._round_of(engine, requests)) for name, engine in engines.items()}
        alternate(sides, self.args.repeats)
        one, many = (statistics.median(sides[name].decode) for name in engines)
        ratio = median_ratio(sides[str(tokens)].decode, sides["1"].decode)
        self.console.print(
            f"A round of 1 token takes {1e3 * one:.1f} ms, one that verifies {tokens}"
            f" {1e3 * many:.1f} ms: {ratio:.2f} times (batch 1, bfloat16)\n"
        )

    @staticmethod
    def _round_of(engine: Engine, requests: Sequence[Request]) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            engine.generate(requests)
            assert engine.times is not None
            return engine.times.decode / engine.times.rounds, 0.0

        return run

    def split(self) -> None:
        """Print where the time of a round goes, without a head and with the one given."""
        kinds: dict[str, tuple[Any, Any, int]] = {"none": (None, (), 0)}
        if self.args.head:
            lent = borrow(self.target, self.params["bfloat16"])
            head, head_params = heads.load(
                self.args.head, self.target.info, "bfloat16", borrowed=lent
            )
            kinds[head.name] = (head, head_params, self.args.num_speculative_tokens)
        table = Table(title="One round, batch 1, bfloat16: ms", title_justify="left", box=None)
        for name in ("head", "drafts", "target", "head's part", "rest", "sum", "whole round"):
            table.add_column(name, justify="left" if name == "head" else "right")
        for name, (head, head_params, drafts) in kinds.items():
            engine = self.engine("bfloat16", 1, head, head_params, drafts)
            times = shares.time_stages(engine, self.requests(1))
            if times is None:
                raise SpecJaxError("too few tokens to time a round: raise --new-tokens")
            parts = (times.forward, times.propose + times.observe, times.commit)
            cells = (f"{1e3 * t:.2f}" for t in (*parts, times.total, times.fused))
            table.add_row(name, str(drafts), *cells)
        self.console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", required=True, help="Hugging Face directory or hub id")
    parser.add_argument("--head", help="directory of a draft head, for the time split")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="torch's, and the bandwidth's")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out")
    args = parser.parse_args(argv)
    if args.new_tokens < 4 or args.repeats < 1 or args.prompt_tokens < 1:
        parser.error("--new-tokens must be at least 4, --repeats and --prompt-tokens at least 1")
    try:
        bench = Bench(args)
        bench.console.print(
            f"{os.cpu_count()} cores, jax {jax.__version__}, {args.repeats} repeats\n"
        )
        for batch in args.batches:
            bench.against_torch(batch)
        bench.verify_pass()
        bench.split()
    except SpecJaxError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
