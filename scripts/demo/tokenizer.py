"""The demonstration target's own tokenizer: byte-level BPE of some four thousand tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

VOCAB = 4096
# In the order of their ids. Nothing but heads that draft blocks ever uses the mask.
PAD, EOS, BOS, MASK, TURN, END = "<pad>", "<eos>", "<bos>", "<mask>", "<|turn>", "<turn|>"
SPECIAL = (PAD, EOS, BOS, MASK, TURN, END)
STOP_IDS = (SPECIAL.index(EOS), SPECIAL.index(END))

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)


def train(texts: Iterable[str], folder: Path) -> None:
    """Learn the merges from texts and write the tokenizer as transformers loads it.

    Digits stand alone, so that numbers are copied and computed digit by digit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        mask_token=MASK,
        additional_special_tokens=[TURN, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
