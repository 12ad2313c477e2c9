"""Prompt sets, and the messages of chat files: every mistake named by file and line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.core.errors import DataError
from specjax.data.benchmarks import BENCHMARKS
from specjax.data.sources import RowError, read_rows

Message = dict[str, Any]
"""One message of a conversation: at least "role" and "content"."""

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """What a user says in one conversation; the answers are the target's to give.

    Attributes:
      turns: the user's messages in order, at least one, none empty.
      system: the system message, None if there is none.
      source: "file:line", for messages.
      answer: the right answer to the last turn, None where none is known.
    """

    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""
    answer: str | None = None

    def opening(self) -> list[Message]:
        """The messages up to and including the first user message."""
        return self.messages(())

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The messages up to the user's that follows these answers, one to each turn before."""
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in zip(self.turns, answers, strict=False):
            said.append({"role": "user", "content": turn})
            said.append({"role": "assistant", "content": answer})
        return [*said, {"role": "user", "content": self.turns[len(answers)]}]


def read_json_lines(source: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) for each row of a source (see `specjax.data.sources`), all of them.

    Raises:
      DataError: no such source, a row that is not a JSON object, or a source without any row.
    """
    for where, row in read_rows(source):
        if isinstance(row, RowError):
            raise row
        yield where, row


def messages_of(row: dict[str, Any], where: str) -> list[Message]:
    """The checked "messages" of a row in chat form, in order.

    Raises:
      DataError: no list "messages", a message without a known role, or with content that is not
        text (it may be missing where there are tool calls).
    """
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise RowError(
            'no list "messages"', f'{where}: expected a list "messages", found keys {sorted(row)}'
        )
    return [checked_message(message, index, where) for index, message in enumerate(messages)]


def checked_message(message: Any, index: int, where: str) -> Message:
    """The message if it has a known role and text; text in parts is joined.

    Raises:
      RowError: no known role, or content that is not text (it may be missing where there are tool
        calls).
    """
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise RowError(
            "unknown role",
            f"{where}: message {index} has role {role!r}, expected one of {', '.join(ROLES)}",
        )
    content = message.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise RowError(
            "message without text", f'{where}: message {index} ({role}) has no text under "content"'
        )
    return message


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    )


def prompt_of(row: dict[str, Any], where: str, suffix: str = "") -> Prompt:
    """The prompt of one row: "turns", "messages" or "prompt", the first of these it has.

    Assistant messages under "messages" are left out: the target answers for itself.

    Raises:
      DataError: none of these keys, no user message, or an empty one.
    """
    system = None
    if "turns" in row:
        turns = row["turns"]
    elif "messages" in row:
        messages = messages_of(row, where)
        turns = [m["content"] for m in messages if m["role"] == "user"]
        system = next((m["content"] for m in messages if m["role"] == "system"), None)
    elif "prompt" in row:
        turns = [row["prompt"]]
    else:
        raise DataError(
            f'{where}: expected "turns" (a list of user messages), "messages" or "prompt", '
            f"found keys {sorted(row)}"
        )
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: expected at least one user message")
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise DataError(f"{where}: user message {index} is not text or is empty")
    answer = row.get("answer")
    if answer is not None and not isinstance(answer, str | int | float):
        raise DataError(f'{where}: "answer" is neither text nor a number')
    said = tuple(turn + suffix for turn in turns)
    return Prompt(said, system, where, None if answer is None else str(answer))


def load_prompts(path: str | Path, suffix: str = "", limit: int | None = None) -> list[Prompt]:
    """Read a prompt set.

    Args:
      path: JSON lines or another source, see `read_rows`; its rows see `prompt_of`. Or the name of
        a benchmark, see `specjax.data.benchmarks`.
      suffix: text appended to each user message.
      limit: read the first ``limit`` rows only.

    Raises:
      DataError: naming file and line, see `read_json_lines` and `prompt_of`.
    """
    benchmark = BENCHMARKS.get(str(path))
    prompts: list[Prompt] = []
    for where, row in read_json_lines(benchmark.source if benchmark else path):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(prompt_of(benchmark.row(row, where) if benchmark else row, where, suffix))
    return prompts
