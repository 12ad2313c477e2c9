"""A tiny byte-level BPE tokenizer with the special tokens of several chat templates."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "<|user|>",
    "<|assistant|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
]

CORPUS = [
    "assistant\nuser\nsystem\nASSISTANT: USER: the answer is four, of course.\n\n",
    "You are helpful. Two and two? And three? It is five <think>\nreason\n</think>\n\n",
] * 4


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Function (template, eos) -> tokenizer; blanks trimmed from offsets, as Llama 3 has it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)

    def make(template: str | None, eos: str) -> PreTrainedTokenizerFast:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=eos, pad_token=eos, bos_token="<s>"
        )
        tokenizer.chat_template = template
        return tokenizer

    return make
