"""A tiny target as a published directory, tokenizer and chat template included."""

from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specjax import targets
from specjax.core.params import init_params
from specjax.io.hf import save_checkpoint
from tests.training.toy import TARGET

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["assistant\nuser\nthe answer is four, of course. and three? two\n"] * 4


def write_target(folder: Path) -> None:
    """Write config.json, model.safetensors and a byte-level tokenizer; <|im_end|> is id 2."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = {**TARGET, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    config["tie_word_embeddings"] = False
    target = targets.from_config(config)
    params = init_params(target.specs(), jax.random.key(1), scale=0.3)
    # Few bytes that are no characters by themselves are ever chosen, so that most texts read back.
    broken = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
    params = params.replace(output=params.output.at[jnp.asarray(broken[8:])].set(0.0))
    save_checkpoint(target.specs(), params, config, folder)
