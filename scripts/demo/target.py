"""The demonstration target: a small Gemma 4, trained from scratch by the trainer of the heads.

To the trainer a language model is a head that reads nothing of a target and whose loss is that of
the next token, so checkpoints, resumption and the log are those of every other run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from scripts.demo.tokenizer import MASK, PAD, SPECIAL, STOP_IDS, VOCAB
from specjax.heads.base import Borrowed, TrainBatch
from specjax.layers.documents import Documents
from specjax.targets.base import Target

PyTree = Any

_KINDS = ("sliding_attention", "sliding_attention", "sliding_attention", "full_attention")
CONFIG = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 224,
    "intermediate_size": 320,
    "num_hidden_layers": 12,
    "layer_types": list(_KINDS * 3),
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 32,
    "attention_k_eq_v": False,
    "attention_bias": False,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "sliding_window": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 100000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "pad_token_id": SPECIAL.index(PAD),
    "bos_token_id": 2,
    "eos_token_id": list(STOP_IDS),
    "mask_token_id": SPECIAL.index(MASK),
    "dtype": "bfloat16",
}


class NextToken:
    """A target as the trainer takes it: its own weights are what is trained."""

    name: ClassVar[str] = "target"
    taps: ClassVar[tuple[int, ...]] = ()
    reads: ClassVar[tuple[int, ...]] = ()

    def __init__(self, target: Target) -> None:
        """Keep the target."""
        self._target = target

    def loss(
        self, params: PyTree, borrowed: Borrowed, batch: TrainBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the mean over every token behind the first of its text, prompts included.

        A model that starts from nothing learns its language from the questions as well.
        """
        del borrowed
        texts = None
        if batch.documents is not None and batch.positions is not None:
            texts = Documents(batch.documents, batch.positions)
        out = self._target.forward(params, batch.tokens, batch.lengths, documents=texts)
        logits = self._target.logits(params, out.hidden[:, :-1])
        labels = batch.tokens[:, 1:]
        place = jnp.arange(1, batch.tokens.shape[1])
        counted = place < batch.lengths[:, None]
        if batch.positions is not None:
            counted &= batch.positions[:, 1:] > 0
        picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - picked

        def mean(of: jax.Array, where: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(where, of, 0)) / jnp.maximum(jnp.sum(where), 1)

        answers = counted & batch.loss_mask[:, 1:]
        right = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
        return mean(nll, counted), {
            "answer_loss": mean(nll, answers),
            "answer_accuracy": mean(right, answers),
        }


def write_config(folder: Path) -> None:
    """Write `config.json` into the folder of the tokenizer."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")


def train(base: Path, chats: Path, out: Path, epochs: int, folder: Path) -> None:
    """Train the target and write it in bfloat16 beside a copy of its tokenizer.

    Args:
        base: folder with configuration and tokenizer.
        chats: conversations to train on.
        out: folder of the run; the same call goes on where it stands.
        epochs: passes over the data.
        folder: where the finished target goes.
    """
    import shutil

    from specjax import targets
    from specjax.core.params import init_params
    from specjax.io.hf import save_checkpoint
    from specjax.training import rows
    from specjax.training.config import DataConfig, OptimConfig, TrainerConfig
    from specjax.training.logging import Display
    from specjax.training.trainer import Trainer

    target = targets.from_config(CONFIG)
    config = TrainerConfig(
        target=str(base),
        out=str(out),
        data=DataConfig(files=str(chats), max_length=512, lengths=(240, 288, 352, 512), holdout=64),
        optim=OptimConfig(lr=2e-3, weight_decay=0.1, warmup=0.03, final=0.02),
        epochs=epochs,
        batch_size=4,
        target_dtype="float32",
        compute_dtype="float32",
        log_every=25,
        save_every=200,
        eval_every=500,
    )
    data = rows.load(config, target.info.stop_ids)
    params = init_params(target.specs(), jax.random.key(config.seed), scale=0.04)
    head = NextToken(target)
    # The frozen target of other runs is never looked at here, and so not computed.
    trainer = Trainer(config, target, params, head, params, data.train, data.heldout)
    display = Display(trainer.total)
    display.say(data.report)
    outcome = trainer.run(display)
    shutil.copytree(base, folder, dirs_exist_ok=True)
    save_checkpoint(target.specs(), outcome.params, CONFIG, folder, dtype="bfloat16")
