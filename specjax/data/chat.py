"""Conversations to token ids and a loss mask over exactly what the assistant says.

A template with generation marks says which part is the assistant's. Few have them; without, the
part is found by rendering:

- it starts where the generation prompt of the messages before it ends;
- its content ends where the text after it begins, which rendering the same conversation with a
  placeholder in its stead shows;
- the end-of-turn token that follows belongs to it: the model must learn to stop. Not so in a
  message with ``"finish_reason": "length"``, which was cut off: its end was never said.

Where a template renders a past turn otherwise than it prompted for it (thinking dropped from
the history, say), the part starts with the content itself. The end-of-turn rules hold with marks
as well, whether these enclose the token or not.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from specjax.core.errors import DataError
from specjax.data.prompts import Message
from specjax.data.sources import RowError
from specjax.data.templates import MARKS
from specjax.data.thinking import think_spans

Tools = Sequence[dict[str, Any]] | None
"""Schemas of functions, as chat templates take them."""


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
        supervise_thinking: bool = True,
        use_marks: bool = True,
        **options: Any,
    ) -> None:
        """Wrap a transformers tokenizer.

        Args:
          tokenizer: a fast (Rust) tokenizer.
          stop_ids: ids that end the target's answers, beside the tokenizer's own eos.
          chat_template: used instead of the tokenizer's own.
          supervise_thinking: whether think blocks that are rendered count as said.
          use_marks: take the assistant's part from the template's generation marks if it has any;
            False finds it by rendering all the same.
          options: passed to the template, such as ``enable_thinking=False``.

        Raises:
          DataError: no chat template, or a tokenizer that cannot report text offsets.
        """
        if chat_template is None and not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; give one with "
                "chat_template: a file, or chatml or plain"
            )
        if not tokenizer.is_fast:
            raise DataError(f"the tokenizer {tokenizer.name_or_path!r} is not a fast one")
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids) | {tokenizer.eos_token_id}
        self._supervise_thinking, self._use_marks = supervise_thinking, use_marks
        self._template, self._options = chat_template, options
        self._backend = _plain_backend(tokenizer)

    def render(
        self, messages: Sequence[Message], generate: bool = False, tools: Tools = None
    ) -> str:
        """The conversation as text, with the generation prompt at its end if ``generate``."""
        return self._render(messages, generate, tools, marks=False)[0]

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Token ids from which the target answers ``messages``."""
        text = self.render(messages, True, tools)
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode(self, messages: Sequence[Message], tools: Tools = None) -> Encoded:
        """Tokens of a conversation and which of them the assistant said.

        Args:
          messages: the conversation.
          tools: schemas of the functions that the assistant may call, for the template.

        Raises:
          RowError: the template refuses the conversation, or renders it so that an answer cannot
            be located.
        """
        text, answers = self._answers(messages, tools)
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=np.int32)
        starts, ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=bool)
        stops = self.stop_ids
        if answers and messages[-1]["role"] == "assistant":
            # Nothing follows the last answer, so a special token there can only end the turn.
            stops = stops | self._special(ids[starts >= answers[-1].end])
        for answer in answers:
            said = (starts >= answer.start) & (ends <= answer.end)
            last = int(np.searchsorted(starts, answer.end))
            if answer.cut:
                said &= ~_trailing_stop(said, ids, stops, text, starts, ends)
            elif not (said.any() and int(ids[np.flatnonzero(said)[-1]]) in stops):
                # Some templates put a line end or a space before the end-of-turn token.
                while last < len(ids) and not text[answer.end : ends[last]].strip():
                    last += 1
                if last < len(ids) and int(ids[last]) in stops:
                    said |= (starts >= answer.start) & (np.arange(len(ids)) <= last)
            if not self._supervise_thinking:
                for first, after in think_spans(text[answer.start : answer.end]):
                    thought = (starts < answer.start + after) & (ends > answer.start + first)
                    said &= ~thought
            mask |= said
        return Encoded(ids, mask)

    def _render(
        self, messages: Sequence[Message], generate: bool, tools: Tools, marks: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans between generation marks if asked for."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        schemas: list[Any] | None = list(tools) if tools else None
        template = self.tokenizer.get_chat_template(self._template, schemas)
        try:
            rendered: Any = render_jinja_template(  # a pair, annotated as text
                conversations=[list(messages)],
                tools=schemas,
                chat_template=template,
                add_generation_prompt=generate,
                return_assistant_tokens_mask=marks,
                **{**self.tokenizer.special_tokens_map, **self._options},
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = [message.get("role") for message in messages]
            raise RowError(
                "refused by the chat template", f"the chat template refuses roles {roles}: {error}"
            ) from None
        (text,), spans = rendered
        return text, [(start, end) for start, end in spans[0]] if marks else []

    def _answers(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list["_Answer"]]:
        """The text of a conversation and the assistant's parts of it, in order."""
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        cut = [messages[i].get("finish_reason") == "length" for i in said]
        template = self.tokenizer.get_chat_template(self._template, list(tools) if tools else None)
        if self._use_marks and MARKS.search(template):
            text, spans = self._render(messages, False, tools, marks=True)
            if len(spans) != len(said) and any(cut):
                raise RowError(
                    "answer not found in the rendering",
                    f"the chat template marks {len(spans)} parts for {len(said)} answers, so that "
                    "the one that was cut off cannot be told",
                )
            cut = cut if len(spans) == len(said) else [False] * len(spans)
            return text, [_Answer(*span, flag) for span, flag in zip(spans, cut, strict=True)]
        text = self.render(messages, tools=tools)
        spans = [self._span(messages, index, text, tools) for index in said]
        return text, [_Answer(*span, flag) for span, flag in zip(spans, cut, strict=True)]

    def _special(self, ids: Int[np.ndarray, " N"]) -> frozenset[int]:
        """The first special token among ``ids``, if any."""
        added = self.tokenizer.added_tokens_decoder
        special = (int(i) for i in ids if int(i) in added and added[int(i)].special)
        return frozenset([first]) if (first := next(special, None)) is not None else frozenset()

    def _span(
        self, messages: Sequence[Message], index: int, text: str, tools: Tools
    ) -> tuple[int, int]:
        """Where in ``text`` the answer ``messages[index]`` starts and its content ends."""
        placeholder = "answer"
        while placeholder in text:
            placeholder += "x"
        marked = list(messages)
        marked[index] = {"role": "assistant", "content": placeholder}
        before, found, after = self.render(marked, tools=tools).rpartition(placeholder)
        if not found or not text.endswith(after):
            raise _hidden(index, "ends")
        end = len(text) - len(after)
        prompt = self.render(messages[:index], generate=True, tools=tools)
        for opening in (prompt, before):
            if text.startswith(opening) and len(opening) <= end:
                return len(opening), end
        raise _hidden(index, "starts")


@dataclass(frozen=True)
class _Answer:
    """An assistant's part: its span in the text, and whether it was cut off at a limit."""

    start: int
    end: int
    cut: bool


def _hidden(index: int, what: str) -> RowError:
    return RowError(
        "answer not found in the rendering",
        f"the chat template hides where message {index} (assistant) {what}",
    )


def _trailing_stop(
    said: Bool[np.ndarray, " S"],
    ids: Int[np.ndarray, " S"],
    stops: frozenset[int],
    text: str,
    starts: Int[np.ndarray, " S"],
    ends: Int[np.ndarray, " S"],
) -> Bool[np.ndarray, " S"]:
    """Which of the tokens said are an end-of-turn token at the end, and blanks after it."""
    ending = np.zeros_like(said)
    for s in np.flatnonzero(said)[::-1]:
        if int(ids[s]) in stops:
            ending[s:] = said[s:]
            return ending
        if text[starts[s] : ends[s]].strip():
            break
    return ending


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
