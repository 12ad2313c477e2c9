"""Single operations that rounds and training steps are made of, against numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was compared.

    Attributes:
        name: what.
        error: largest difference, relative to the largest value; infinite where it failed to run.
        limit: what is still right.
        said: of the failure, where it failed to run.
    """

    name: str
    error: float
    limit: float
    said: str = ""

    @property
    def right(self) -> bool:
        """Whether it is within its limit."""
        return self.error <= self.limit


def difference(got: Any, want: Any) -> float:
    """Return the largest difference of two trees, relative to the largest value of the second.

    Integers and booleans differ by 1 where any of them does.
    """
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape:
            return float("inf")
        if not np.issubdtype(b.dtype, np.floating) and b.dtype.name != "bfloat16":
            worst = max(worst, float((a != b).any()))
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        if not np.isfinite(a).all():
            return float("inf")
        worst = max(
            worst, float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-9))
        )
    return worst


def run(name: str, limit: float, compute: Callable[[], Any], want: Callable[[], Any]) -> Check:
    """Compare, and take a failure to run for a difference."""
    try:
        return Check(name, difference(jax.device_get(compute()), want()), limit)
    except Exception as error:  # whatever a platform lacks
        return Check(name, float("inf"), limit, (str(error).splitlines() or [""])[0][:200])


def operations(device: jax.Device) -> list[Check]:
    """Compare operations on a device with numpy."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(64, 48)).astype(np.float32) for _ in range(2))
    ids = rng.permutation(64).astype(np.int32)
    high = jax.lax.Precision.HIGHEST

    def on(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        return lambda: jax.jit(function)(*jax.device_put(args, device))

    def bf16(x: np.ndarray) -> Any:
        return jnp.asarray(x, jnp.bfloat16)

    codes = np.delete(np.arange(256, dtype=np.uint8), [127, 255])  # all but what is no number
    exact = np.asarray(bf16(a), np.float32) @ np.asarray(bf16(b), np.float32).T
    best = np.argsort(-a, axis=1, kind="stable")[:, :5]
    return [
        run("product, float32", 1e-5, on(lambda x, y: jnp.matmul(x, y.T, precision=high), a, b),
            lambda: a.astype(np.float64) @ b.astype(np.float64).T),
        run("product, bfloat16 into float32", 1e-5,
            on(lambda x, y: jax.lax.dot_general(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16),
                                                (((1,), (1,)), ((), ())),
                                                preferred_element_type=jnp.float32), a, b),
            lambda: exact),
        run("softmax", 1e-5, on(jax.nn.softmax, a),
            lambda: np.exp(a) / np.exp(a).sum(-1, keepdims=True)),
        run("sort", 0, on(lambda x: jnp.argsort(x, axis=1, stable=True), a),
            lambda: np.argsort(a, axis=1, kind="stable").astype(np.int32)),
        run("top k", 0, on(lambda x: jax.lax.top_k(x, 5)[1], a), lambda: best.astype(np.int32)),
        run("running sum", 1e-5, on(lambda x: jnp.cumsum(x, axis=0), a),
            lambda: np.cumsum(a.astype(np.float64), axis=0)),
        run("scatter that drops", 0,
            on(lambda x, i: jnp.zeros_like(x).at[i + 32].set(x, mode="drop"), a, ids),
            lambda: _scattered(a, ids)),
        run("random bits", 0, on(lambda: jax.random.bits(jax.random.key(7), (16,))),
            lambda: jax.device_get(_on_cpu(lambda: jax.random.bits(jax.random.key(7), (16,))))),
        run("float8 from its bits", 0,
            on(lambda x: jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float32),
               codes),
            lambda: codes.view(jnp.float8_e4m3fn).astype(np.float32)),
        run("while loop", 0, on(_collatz), lambda: np.int32(111)),
    ]  # fmt: skip


def _scattered(a: np.ndarray, ids: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for row, at in zip(a, ids + 32, strict=True):
        if at < len(a):
            out[at] = row
    return out


def _on_cpu(function: Callable[[], Any]) -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(function)()


def _collatz() -> jax.Array:
    """Steps from 27 to 1."""

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        n, count = carry
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

    return jax.lax.while_loop(lambda c: c[0] != 1, step, (jnp.int32(27), jnp.int32(0)))[1]
