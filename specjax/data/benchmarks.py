"""Benchmarks by name: where on the hub they are, and how a row of theirs becomes a prompt.

Questions are put as the evaluations of published draft heads put them, so that figures compare.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specjax.core.errors import DataError
from specjax.data.sources import HUB

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:\n"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
      source: a source that `specjax.data.sources` reads.
      convert: from its row to one with "turns" and, where the right answer is a text, "answer".
    """

    source: str
    convert: Callable[[dict[str, Any]], dict[str, Any]]

    def row(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The row as a prompt file holds it.

        Raises:
          DataError: a row that is not of this benchmark.
        """
        try:
            return self.convert(row)
        except (KeyError, AttributeError, TypeError) as error:
            raise DataError(
                f"{where}: not a row of this benchmark (no {error}), found keys {sorted(row)}"
            ) from None


def _gsm8k(row: dict[str, Any]) -> dict[str, Any]:
    return {"turns": [row["question"] + _BOXED], "answer": row["answer"].rpartition("####")[2]}


def _math500(row: dict[str, Any]) -> dict[str, Any]:
    return {"turns": [row["problem"] + _BOXED], "answer": row["answer"]}


def _humaneval(row: dict[str, Any]) -> dict[str, Any]:
    return {"turns": [f"{_CODE}```python\n{row['prompt']}\n```"]}


def _mbpp(row: dict[str, Any]) -> dict[str, Any]:
    return {"turns": [row["prompt"]]}


def _mt_bench(row: dict[str, Any]) -> dict[str, Any]:
    return {"turns": list(row["prompt"])}


BENCHMARKS = {
    "gsm8k": Benchmark(f"{HUB}openai/gsm8k/main:test", _gsm8k),
    "math500": Benchmark(f"{HUB}HuggingFaceH4/MATH-500:test", _math500),
    "humaneval": Benchmark(f"{HUB}openai/openai_humaneval:test", _humaneval),
    "mbpp": Benchmark(f"{HUB}google-research-datasets/mbpp/sanitized:test", _mbpp),
    "mt-bench": Benchmark(f"{HUB}HuggingFaceH4/mt_bench_prompts:train", _mt_bench),
}
"""By the name that `--prompts` takes. A file of such a name is written with its folder: ./gsm8k."""
