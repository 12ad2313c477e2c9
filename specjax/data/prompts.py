"""Prompt files and chat files: JSON lines, every mistake named by file and line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.core.errors import DataError

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
    """

    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""

    def opening(self) -> list[Message]:
        """The messages up to and including the first user message."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.turns[0]}]


def read_json_lines(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", object) for each line of a UTF-8 JSON lines file that is not blank.

    Raises:
      DataError: no such file, a line that is not a JSON object, or a file without any row.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"no such file: {path}")
    empty = True
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:  # also a line that is not UTF-8
                raise DataError(f"{where}: not a line of JSON in UTF-8: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
            empty = False
            yield where, row
    if empty:
        raise DataError(f"{path} is empty: expected one JSON object a line")


def messages_of(row: dict[str, Any], where: str) -> list[Message]:
    """The checked "messages" of a row in chat form, in order.

    Raises:
      DataError: no list "messages", a message without a known role, or with content that is not
        text (it may be missing where there are tool calls).
    """
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise DataError(f'{where}: expected a list "messages", found keys {sorted(row)}')
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise DataError(
                f"{where}: message {index} has role {role!r}, expected one of {', '.join(ROLES)}"
            )
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise DataError(f'{where}: message {index} ({role}) has no text under "content"')
    return messages


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
    return Prompt(tuple(turn + suffix for turn in turns), system, where)


def load_prompts(path: str | Path, suffix: str = "", limit: int | None = None) -> list[Prompt]:
    """Read a prompt file.

    Args:
      path: JSON lines, see `prompt_of`.
      suffix: text appended to each user message.
      limit: read the first ``limit`` rows only.

    Raises:
      DataError: naming file and line, see `read_json_lines` and `prompt_of`.
    """
    prompts: list[Prompt] = []
    for where, row in read_json_lines(path):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(prompt_of(row, where, suffix))
    return prompts
