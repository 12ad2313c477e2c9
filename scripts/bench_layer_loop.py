"""What does compiling cost when layers are unrolled, and when they are scanned?

    python scripts/bench_layer_loop.py [--layers 8 64] [--families qwen3 gemma4 qwen3_5]

Seconds to trace and compile one verify pass (5 new tokens on a cache) of narrow models, both layer
loops, and the seconds of one call. The models are narrow because compile time hardly depends on
width; what a call costs does, so its ratio holds for these widths alone.
"""

import argparse
import functools
import shlex
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from specjax import targets
from specjax.core.params import init_params
from specjax.targets import Target, TargetConfig

_SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip
_ROPE = {"rope_theta": 1e4, "rope_type": "default"}


def config(family: str, layers: int) -> dict[str, Any]:
    """Return a narrow configuration with the family's pattern of layers."""
    common = {**_SMALL, "num_hidden_layers": layers}
    if family == "qwen3":
        return {**common, "model_type": "qwen3"}
    if family == "gemma4":
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        return {
            **common,
            "model_type": "gemma4_text",
            "layer_types": [kinds[i % 6] for i in range(layers - 1)] + ["full_attention"],
            "global_head_dim": 32,
            "sliding_window": 64,
            "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
        }
    return {
        **common,
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }


def measure(target: Target, repeats: int) -> tuple[float, float]:
    """Return seconds of compiling a verify pass, and of a call."""
    params = init_params(target.specs(), jax.random.key(0))
    cache = target.init_cache(1, 128)
    tokens = jnp.ones((1, 5), jnp.int32)

    def verify(params: Any, cache: Any) -> Any:
        out = target.forward(params, tokens, cache=cache)
        logits = target.logits(params, out.hidden)
        return logits, target.commit(cache, out.update, jnp.where(logits[:, 0, 0] > 9e9, 0, 3))

    start = time.perf_counter()
    run = jax.jit(verify).lower(params, cache).compile()
    compiling = time.perf_counter() - start
    call = functools.partial(run, params, cache)
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return compiling, statistics.median(seconds)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 64])
    families = ("qwen3", "gemma4", "qwen3_5")
    parser.add_argument("--families", nargs="+", choices=families, default=list(families))
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    table = Table(box=None, pad_edge=False)
    for name in ("family", "layers", "unroll: compile s", "scan: compile s", "ratio",
                 "unroll: call ms", "scan: call ms"):  # fmt: skip
        table.add_column(name, justify="left" if name == "family" else "right")
    for family in args.families:
        for layers in args.layers:
            found = []
            for loop in ("unroll", "scan"):
                how = TargetConfig(layer_loop=loop)  # type: ignore[arg-type]
                target = targets.from_config(config(family, layers), how)
                found.append(measure(target, args.repeats))
            (unroll, first), (scan, second) = found
            compiled = (f"{unroll:.2f}", f"{scan:.2f}", f"{unroll / scan:.1f}")
            called = (f"{1e3 * first:.2f}", f"{1e3 * second:.2f}")
            table.add_row(family, str(layers), *compiled, *called)
    console = Console(width=100)
    console.print(f"python scripts/bench_layer_loop.py {shlex.join(sys.argv[1:])}", style="dim")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
