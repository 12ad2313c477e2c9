"""Settings of an evaluation. Imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from specjax.core.errors import ConfigError
from specjax.data.prompts import read_json_lines
from specjax.decode.config import EngineConfig
from specjax.heads.plain_config import NgramConfig
from specjax.targets.config import TargetConfig

Dtype = Literal["float32", "bfloat16"]

# Not swept: where results go, and the sweep itself.
_FIXED = ("Eval.out", "Sweep.")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What to measure, on which prompts, and where the records go.

    Attributes:
      target: directory or hub id of the target; "" takes the embedded default, with its own heads
        and prompts.
      head: directory or hub id of a draft head; "mtp" for the modules in the target's own
        checkpoint, "ngram" for prompt lookup, "small_model:DIR" for another model, "none" for the
        baseline alone. Several, with commas between, are cells of a sweep.
      prompts: JSON lines file of prompts ("turns", "messages" or "prompt"; with "answer", where
        there is one), or gsm8k, math500, humaneval, mbpp or mt-bench for that benchmark from the
        hub. Turns are answered in order. Several, with commas between, are cells of a sweep.
      num_prompts: how many prompts of the file, from its start; 0 takes all.
      chat_template: True renders prompts with the tokenizer's own chat template, a file with that
        one ("chatml" and "plain" are built in); False gives them as they are.
      enable_thinking: passed to the chat template; None leaves it to the template.
      num_speculative_tokens: drafts per round.
      concurrency: prompts decoded together.
      max_new_tokens: most tokens of an answer.
      temperature: 0 is greedy.
      top_k: keep the k most probable tokens; 0 is off.
      top_p: keep the smallest set of tokens with this mass; 1 is off.
      min_p: keep tokens with at least this share of the largest probability; 0 is off.
      seed: prompt i samples with seed + i.
      dtype: of the weights in the speculative run; float32 proves identity, bfloat16 is faster.
      baseline_dtypes: dtypes in which the baseline is measured; dtype must be one of them. The
        speedup is against the fastest.
      repeats: how often each run is measured, in alternation.
      time_shares: time the stages of a round apart.
      calibration: measure how well the head's confidences are calibrated, where it has any.
      trace: of how many prompts trace.html shows the texts, token by token, and what was drafted.
      out: directory of the results; "" is runs/<time>.
      target_options: how the target is held and run.
      ngram: settings of prompt lookup.
      engine: the engine's other settings.
    """

    target: str = ""
    head: str = ""
    prompts: str = ""
    num_prompts: int = 0
    chat_template: bool | str = True
    enable_thinking: bool | None = None
    num_speculative_tokens: int = 4
    concurrency: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    dtype: Dtype = "float32"
    baseline_dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    repeats: int = 3
    time_shares: bool = True
    calibration: bool = True
    trace: int = 0
    out: str = ""
    target_options: TargetConfig = dataclasses.field(default_factory=TargetConfig)
    ngram: NgramConfig = dataclasses.field(default_factory=NgramConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        given = {name: getattr(self, name) for name in ("head", "prompts")}
        if self.target:
            for name, value in given.items():
                hint = ', or "none" for the baseline alone' if name == "head" else ""
                if not value:
                    raise ConfigError(f"Eval.{name} is not set: give a path{hint}")
        elif any(given.values()):
            names = " and ".join(f"Eval.{name}" for name, value in given.items() if value)
            raise ConfigError(f"{names} without Eval.target: the embedded default has its own")
        for name, least in (
            ("num_prompts", 0),
            ("num_speculative_tokens", 0),
            ("concurrency", 1),
            ("max_new_tokens", 1),
            ("repeats", 1),
            ("trace", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"Eval.{name} is {getattr(self, name)}; it must be at least {least}"
                )
        if self.chat_template == "":
            raise ConfigError('Eval.chat_template is "": give True, False or a file')
        if self.dtype not in self.baseline_dtypes:
            raise ConfigError(
                f"Eval.dtype {self.dtype!r} is not among Eval.baseline_dtypes"
                f" {self.baseline_dtypes}: the texts are compared within one dtype"
            )
        if len(set(self.baseline_dtypes)) != len(self.baseline_dtypes):
            raise ConfigError(f"Eval.baseline_dtypes {self.baseline_dtypes} repeats one")
        if self.head not in ("", "none") and self.num_speculative_tokens == 0:
            raise ConfigError('Eval.num_speculative_tokens is 0: use Eval.head = "none"')
        for name in ("num_speculative_tokens", "concurrency"):
            default = EngineConfig.__dataclass_fields__[name].default
            if getattr(self.engine, name) != default:
                raise ConfigError(f"set Eval.{name}, not Engine.{name}, in an evaluation")

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax, so that texts can be compared."""
        return self.temperature < 1e-5


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Which evaluations to run, all the other settings being equal.

    Attributes:
      grid: values by parameter; every combination is a cell. A parameter of Eval needs no prefix,
        others are written `Engine.verification`.
      cells: JSON lines file instead of the grid, an object of parameters and values a cell.
      together: cells measured in alternation with one run of their baseline. Their records are
        written when all of them are done, so an interruption costs at most these.
      retry: run cells again that failed before.
    """

    grid: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    cells: str = ""
    together: int = 4
    retry: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if self.grid and self.cells:
            raise ConfigError("a sweep is either a grid (--sweep) or a file (--sweep-cells)")
        for name, values in self.grid.items():
            if not values:
                raise ConfigError(f"the sweep gives no value for {name}")
        if self.together < 1:
            raise ConfigError(f"Sweep.together is {self.together}; it must be at least 1")


def cell_settings(sweep: SweepConfig) -> list[dict[str, Any]]:
    """Return what each cell sets, by `Name.parameter`; [{}] where nothing is swept.

    Raises:
        ConfigError: a parameter that cannot be swept.
        DataError: a file of cells that cannot be read.
    """
    if sweep.cells:
        rows = [_named(row) for _, row in read_json_lines(sweep.cells)]
    else:
        given = _named(sweep.grid)
        rows = [
            dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())
        ]
    return rows


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    named = {name if "." in name else f"Eval.{name}": value for name, value in values.items()}
    if len(named) < len(values):
        raise ConfigError("the sweep names one parameter twice, with Eval. and without")
    for name in named:
        if name.startswith(_FIXED):
            raise ConfigError(f"{name} cannot be swept")
    return named


def listed(config: EvalConfig) -> Iterator[EvalConfig]:
    """Yield one evaluation for each of the heads and prompt sets that a configuration lists."""
    for prompts in _items(config.prompts):
        for head in _items(config.head):
            yield dataclasses.replace(config, head=head, prompts=prompts)


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] or [text]
