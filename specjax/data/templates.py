"""Chat templates: a few by name for tokenizers that have none, others from a file."""

import re
from pathlib import Path
from typing import Any

from specjax.core.errors import DataError, nearest

BUILT_IN = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # No token of its own: for base models. The end of an answer is the tokenizer's end of text.
    "plain": (
        "{{ bos_token or '' }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "Assistant: {{ m['content'] or '' }}{{ eos_token }}\n"
        "{% else %}{{ m['role'] | capitalize }}: {{ m['content'] or '' }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}
"""Templates by name."""

NEEDS = {"chatml": ("<|im_start|>", "<|im_end|>")}
"""Tokens without which a built-in template would fall into pieces."""

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What opens the assistant's part in a template that marks it."""


def read_template(name: str, tokenizer: Any) -> str:
    """The text of a template.

    Args:
      name: of a built-in one, or a file.
      tokenizer: that will render it.

    Raises:
      DataError: neither name nor file, or a built-in one whose tokens the tokenizer lacks.
    """
    if name in BUILT_IN:
        vocabulary = tokenizer.get_vocab()
        if lacking := [token for token in NEEDS.get(name, ()) if token not in vocabulary]:
            raise DataError(
                f"the chat template {name!r} needs the token {lacking[0]}, which the tokenizer "
                f"{tokenizer.name_or_path!r} lacks; 'plain' needs none"
            )
        return BUILT_IN[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"chat template {name!r} is neither a file nor one of {', '.join(BUILT_IN)}"
            f"{nearest(name, BUILT_IN)}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except ValueError:
        raise DataError(f"the chat template {path} is not UTF-8 text") from None
