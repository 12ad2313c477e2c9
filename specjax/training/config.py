"""What a training run can be told: data, optimiser and the loop around them."""

from dataclasses import dataclass, field
from typing import Literal

from specjax.core.errors import ConfigError
from specjax.core.mesh_config import MeshConfig
from specjax.data.sources import split_list
from specjax.targets.config import TargetConfig

Dtype = Literal["float32", "bfloat16"]


def _at_least(owner: object, least: int, *names: str) -> None:
    """Refuse integer fields below `least`, in one line that names the field."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < least:
            kind = type(owner).__name__.removesuffix("Config")
            raise ConfigError(f"{kind}.{name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its learning rate.

    Attributes:
        name: adamw, or muon (matrices by orthogonalised momentum, the rest by AdamW).
        lr: highest learning rate.
        betas: decay of the two moments.
        eps: AdamW's divisor floor.
        weight_decay: decoupled decay, on matrices only.
        warmup: fraction of the steps in which the rate rises from 0.
        schedule: how the rate goes on after that: cosine or linear to `final`, or constant.
        final: last rate as a fraction of `lr`.
        clip: largest global norm of the gradients; 0 for no limit.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: float = 0.04
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    final: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if self.lr <= 0:
            raise ConfigError(f"Optim.lr must be above 0, got {self.lr}")
        for name in ("warmup", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"Optim.{name} must lie in 0 to 1, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"Optim.betas lie in 0 to below 1, got {self.betas}")
        _at_least(self, 0, "eps", "weight_decay", "clip")


@dataclass(frozen=True)
class DataConfig:
    """What a head is trained on.

    Attributes:
        files: sources of conversations, with commas between or as a tuple: JSON lines, .json,
            .parquet, a folder of these or one that `datasets` saved, or
            hf://datasets/OWNER/NAME[:SPLIT]. The assistant's tokens are supervised.
        max_length: longer conversations are cut to this many tokens.
        lengths: static lengths that batches are padded to, ascending; empty for four of them up
            to `max_length`. Each costs one compilation. With `pack` at most one.
        pack: put several conversations into a row of the one length (`max_length` unless
            `lengths` says another), each of which trains as if it stood alone.
        min_supervised: rows with fewer supervised tokens are left out and counted.
        holdout: this many rows are kept out of training, to measure the loss on.
        shuffle: draw rows in an order given by seed and epoch.
        strict: refuse a malformed row instead of counting it.
        chat_template: used instead of the tokenizer's: a file, or chatml or plain.
        enable_thinking: passed to the chat template; None leaves it to the template.
        supervise_thinking: whether think blocks of the answers are trained on where the template
            keeps them.
    """

    files: str | tuple[str, ...] = ()
    max_length: int = 512
    lengths: tuple[int, ...] = ()
    pack: bool = False
    min_supervised: int = 1
    holdout: int = 0
    shuffle: bool = True
    strict: bool = False
    chat_template: str | None = None
    enable_thinking: bool | None = None
    supervise_thinking: bool = True

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        _at_least(self, 2, "max_length")
        _at_least(self, 1, "min_supervised")
        _at_least(self, 0, "holdout")
        if self.lengths and (
            list(self.lengths) != sorted(set(self.lengths)) or self.lengths[-1] < self.max_length
        ):
            raise ConfigError(
                f"Data.lengths must ascend and end at or above Data.max_length "
                f"{self.max_length}, got {self.lengths}"
            )
        if self.pack and len(self.lengths) > 1:
            raise ConfigError(f"Data.pack takes one of Data.lengths, got {self.lengths}")

    @property
    def paths(self) -> tuple[str, ...]:
        """The sources, however many were given."""
        return split_list(self.files)

    def buckets(self) -> tuple[int, ...]:
        """The static lengths in use: those given, or quarters of the longest."""
        if self.lengths or self.pack:
            return self.lengths or (self.max_length,)
        return tuple(sorted({-(-self.max_length * part // 4) for part in (1, 2, 3, 4)}))


@dataclass(frozen=True)
class TrainerConfig:
    """One training run. The same configuration with the same `out` resumes it.

    Attributes:
        target: directory or hub id of the frozen target.
        out: folder of the run: checkpoints, log, configuration and the trained head.
        data: what to train on.
        optim: how to train.
        epochs: passes over the data, where `steps` is not given.
        steps: optimiser steps, or None to let `epochs` decide.
        batch_size: conversations in a forward pass.
        accumulation: forward passes in an optimiser step.
        init_from: draft head to start from: a directory or hub id, or "mtp" for the modules in the
            target's checkpoint. Its shape is its own; how it is trained is said here. "" starts
            from fresh weights.
        target_options: how the target is held and run.
        target_dtype: dtype of the target and so of its features.
        features: folder of a cache that scripts/cache_features.py wrote, read in place of running
            the target; "" runs it.
        mesh: devices that a step is spread over: rows of the batch, the target's products, and the
            head's masters and moments.
        compute_dtype: dtype of the head's products; its master weights are float32 always.
        feature_noise: largest noise on the tapped states, drawn uniformly, as a fraction of each
            state's root mean square.
        ema: decay of the running average of the weights, which is then measured and exported; 0
            for the weights themselves. It rises to this from 0.1 in the first steps.
        seed: of the initial weights, the data order and everything random.
        log_every: optimiser steps between records.
        save_every: optimiser steps between checkpoints.
        keep: newest checkpoints kept.
        eval_every: optimiser steps between measurements on the held-out rows; 0 for the end only.
        decode_every: optimiser steps between measurements by decoding; 0 for none. The best
            checkpoint by mean acceptance length is kept and exported then.
        decode_prompts: prompts decoded, those of the first held-out rows.
        decode_tokens: tokens decoded of each.
        num_speculative_tokens: drafts of a round in these measurements, if the head can give so
            many.
        max_skipped: consecutive non-finite steps after which the run stops.
        tensorboard: write the log for TensorBoard too, under `out`.
        wandb: project of Weights & Biases to report to; "" for none.
        export_dtype: dtype of the trained head on disk.
    """

    target: str
    out: str
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 8
    accumulation: int = 1
    init_from: str = ""
    target_options: TargetConfig = field(default_factory=TargetConfig)
    target_dtype: Dtype = "bfloat16"
    features: str = ""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    compute_dtype: Dtype = "bfloat16"
    feature_noise: float = 0.0
    ema: float = 0.0
    seed: int = 0
    log_every: int = 10
    save_every: int = 100
    keep: int = 2
    eval_every: int = 0
    decode_every: int = 0
    decode_prompts: int = 16
    decode_tokens: int = 64
    num_speculative_tokens: int = 4
    max_skipped: int = 10
    tensorboard: bool = False
    wandb: str = ""
    export_dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        counts = ("epochs", "steps", "batch_size", "accumulation", "log_every", "save_every")
        _at_least(self, 1, *counts, "keep", "max_skipped")
        _at_least(self, 1, "decode_prompts", "decode_tokens", "num_speculative_tokens")
        _at_least(self, 0, "seed", "eval_every", "decode_every", "feature_noise")
        if not 0 <= self.ema < 1:
            raise ConfigError(f"Trainer.ema must lie in 0 to below 1, got {self.ema}")
        if not self.target or not self.out:
            raise ConfigError("Trainer.target and Trainer.out must be given")
        if not self.data.files:
            raise ConfigError("Data.files is empty: give at least one chat file to train on")
