"""Conversations to token ids and a loss mask over exactly what the assistant says.

Chat templates seldom mark the assistant's part, so it is found by rendering:

- it starts where the generation prompt of the messages before it ends;
- its content ends where the text after it begins, which rendering the same conversation with a
  placeholder in its stead shows;
- the end-of-turn token that follows belongs to it: the model must learn to stop. Not so in a
  message with ``"finish_reason": "length"``, which was cut off: its end was never said.

Where a template renders a past turn otherwise than it prompted for it (thinking dropped from
the history, say), the part starts with the content itself.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from specjax.core.errors import DataError
from specjax.data.prompts import Message


@dataclass(frozen=True)
class Encoded:
    """One conversation as tokens.

    Attributes:
      ids: token ids.
      mask: true where the token itself was said by the assistant. The hidden state that
        predicts token s is that of position s - 1.
    """

    ids: Int[np.ndarray, " S"]
    mask: Bool[np.ndarray, " S"]

    def cut(self, length: int | None) -> "Encoded":
        """The first ``length`` tokens."""
        return Encoded(self.ids[:length], self.mask[:length])


class ChatEncoder:
    """Renders conversations with a tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int] = (),
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        """Wrap a transformers tokenizer.

        Args:
          tokenizer: a fast (Rust) tokenizer.
          stop_ids: ids that end the target's answers, beside the tokenizer's own eos.
          chat_template: used instead of the tokenizer's own.
          options: passed to the template, such as ``enable_thinking=False``.

        Raises:
          DataError: no chat template, or a tokenizer that cannot report text offsets.
        """
        if chat_template is None and not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; give one with "
                "chat_template"
            )
        if not tokenizer.is_fast:
            raise DataError(f"the tokenizer {tokenizer.name_or_path!r} is not a fast one")
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids) | {tokenizer.eos_token_id}
        self._options = dict(options)
        if chat_template is not None:
            self._options["chat_template"] = chat_template
        self._backend = _plain_backend(tokenizer)

    def render(self, messages: Sequence[Message], generate: bool = False) -> str:
        """The conversation as text, with the generation prompt at its end if ``generate``."""
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generate, **self._options
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = [message.get("role") for message in messages]
            raise DataError(f"the chat template refuses roles {roles}: {error}") from None

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids from which the target answers ``messages``."""
        return self._backend.encode(self.render(messages, True), add_special_tokens=False).ids

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Tokens of a conversation and which of them the assistant said.

        Raises:
          DataError: the template refuses the conversation, or renders it so that an answer
            cannot be located.
        """
        text = self.render(messages)
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=np.int32)
        starts, ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=bool)
        stops = self.stop_ids
        if messages and messages[-1]["role"] == "assistant":
            # Nothing follows the last answer, so a special token there can only end the turn.
            _, end = self._span(messages, len(messages) - 1, text)
            stops = stops | self._special(ids[starts >= end])
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start, end = self._span(messages, index, text)
            mask |= (starts >= start) & (ends <= end)
            if message.get("finish_reason") == "length":
                continue
            after = int(np.searchsorted(starts, end))
            # Some templates put a line end or a space before the end-of-turn token.
            while after < len(ids) and not text[end : ends[after]].strip():
                after += 1
            if after < len(ids) and int(ids[after]) in stops:
                mask |= (starts >= start) & (np.arange(len(ids)) <= after)
        return Encoded(ids, mask)

    def _special(self, ids: Int[np.ndarray, " N"]) -> frozenset[int]:
        """The first special token among ``ids``, if any."""
        added = self.tokenizer.added_tokens_decoder
        special = (int(i) for i in ids if int(i) in added and added[int(i)].special)
        return frozenset([first]) if (first := next(special, None)) is not None else frozenset()

    def _span(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """Where in ``text`` the answer ``messages[index]`` starts and its content ends."""
        placeholder = "answer"
        while placeholder in text:
            placeholder += "x"
        marked = list(messages)
        marked[index] = {"role": "assistant", "content": placeholder}
        before, found, after = self.render(marked).rpartition(placeholder)
        if not found or not text.endswith(after):
            raise DataError(f"the chat template hides where message {index} (assistant) ends")
        end = len(text) - len(after)
        prompt = self.render(messages[:index], generate=True)
        for opening in (prompt, before):
            if text.startswith(opening) and len(opening) <= end:
                return len(opening), end
        raise DataError(f"the chat template hides where message {index} (assistant) starts")


def _plain_backend(tokenizer: Any) -> Any:
    """A copy of the tokenizer's backend whose offsets cover the whole text.

    A post-processor adds special tokens, which the template has written already, and trims blanks
    from the offsets, which would lose them at the edges of an answer.
    """
    from tokenizers import processors

    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.post_processor = processors.Sequence([])
    backend.no_padding()
    backend.no_truncation()
    return backend
