"""Where an answer thinks before it speaks, by the delimiters that models write."""

import re

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis", "<|end|>"),
)
"""What opens and closes a think block."""

_BLOCKS = [
    re.compile(rf"{re.escape(first)}.*?(?:{re.escape(last)}\s*|\Z)", re.DOTALL)
    for first, last in TAGS
]


def think_spans(said: str) -> list[tuple[int, int]]:
    """Spans of the think blocks in an answer, delimiters and the blanks after them included.

    Args:
      said: the answer as rendered, from where the model takes over. A block that the prompt
        opened is closed in it only; one that was cut off runs to the end.
    """
    spans: list[tuple[int, int]] = []
    for (first, last), block in zip(TAGS, _BLOCKS, strict=True):
        at = 0
        close, opening = said.find(last), said.find(first)
        if close >= 0 and (opening < 0 or close < opening):
            at = close + len(last)
            at += len(said[at:]) - len(said[at:].lstrip())
            spans.append((0, at))
        spans += [match.span() for match in block.finditer(said, at)]
    return spans
