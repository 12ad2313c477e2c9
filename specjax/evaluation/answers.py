"""Right or wrong: the final answer of a text against the one its prompt came with.

The final answer is what stands in the last \\boxed{...}, else behind the last "####", else the
whole text. Two are the same if they are the same number, or the same text but for blanks, dollar
signs, a full stop at the end, and the size and text commands of LaTeX. Nothing is computed: 1/2 is
not 0.5.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)")
_DECORATION = re.compile(r"\\(?:left|right|,|!|;|:| )|\\(?:text|mathrm|textbf)(?=\{)")


def final_answer(text: str) -> str:
    """Return the final answer of a text."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        start += len("\\boxed{")
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[start:at].strip()
    return text.rpartition("####")[2].strip()


def is_right(text: str, answer: str) -> bool:
    """Return whether a text ends in the right answer."""
    return _plain(final_answer(text)) == _plain(final_answer(answer))


def _plain(answer: str) -> str | float:
    text = _DECORATION.sub("", answer).replace("\\$", "").replace("$", "").replace("\\%", "%")
    text = re.sub(r"\s+", "", text).rstrip(".")
    text = text.removeprefix("{").removesuffix("}") if re.fullmatch(r"\{[^{}]*\}", text) else text
    number = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return float(number) if _NUMBER.fullmatch(number) else text
