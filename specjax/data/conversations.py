"""Rows of chat data to encoded conversations; what cannot be trained on is counted by reason.

Formats, by the keys of a row: ``messages`` (role, content), ``conversations`` (from, value; or
role, content), ``turns`` and ``responses``, ``prompt`` and ``response`` or ``completion``.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.core.errors import DataError
from specjax.data.chat import ChatEncoder, Encoded
from specjax.data.prompts import Message, messages_of
from specjax.data.sources import RowError, read_rows

SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
"""Names in "from" beside the roles themselves."""

SHOWN = 3
"""Malformed rows of a kind whose message is kept."""


@dataclass
class RowCounts:
    """What became of the rows of the sources.

    Attributes:
      used: rows that are trained on.
      cut: of these, rows cut to the maximum length.
      empty: rows without messages.
      short: rows of fewer than two tokens, in which nothing is predicted.
      masked: rows without an assistant's token within the maximum length.
      tokens: tokens of the used rows.
      supervised: of these, tokens the assistant said.
      malformed: rows that cannot be read or rendered, by reason.
      places: messages of the first malformed rows of each reason, with their places.
    """

    used: int = 0
    cut: int = 0
    empty: int = 0
    short: int = 0
    masked: int = 0
    tokens: int = 0
    supervised: int = 0
    malformed: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)

    def refuse(self, error: RowError) -> None:
        """Count a malformed row."""
        self.malformed[error.reason] += 1
        if self.malformed[error.reason] <= SHOWN:
            self.places.append(str(error))

    def left_out(self) -> dict[str, int]:
        """Rows that are not used, by reason; reasons without a row are left out."""
        reasons = {
            "empty": self.empty,
            "too short": self.short,
            "without an answer in reach": self.masked,
            **{f"malformed ({reason})": n for reason, n in sorted(self.malformed.items())},
        }
        return {reason: number for reason, number in reasons.items() if number}


def conversation_of(row: dict[str, Any], where: str) -> list[Message]:
    """The messages of a row in any of the formats.

    Raises:
      RowError: a format that is none of them, or a message that is malformed.
    """
    if "messages" in row:
        messages = messages_of(row, where)
    elif "conversations" in row:
        messages = messages_of({"messages": _from_speakers(row["conversations"], where)}, where)
    elif "turns" in row:
        messages = _paired(row, row["turns"], "responses", where)
    elif "prompt" in row and isinstance(row["prompt"], list):
        # Both sides as messages.
        key = _answer_key(row, where)
        if not isinstance(row[key], list):
            raise _wrong(where, f'"prompt" is a list of messages but "{key}" is not')
        messages = messages_of({"messages": [*row["prompt"], *row[key]]}, where)
    elif "prompt" in row:
        messages = _paired(row, row["prompt"], _answer_key(row, where), where)
    else:
        raise RowError(
            "unknown format",
            f'{where}: expected "messages", "conversations", "turns" with "responses" or "prompt" '
            f'with "response" or "completion", found keys {sorted(row)}',
        )
    answered = bool(messages) and messages[-1]["role"] == "assistant"
    if answered and row.get("finish_reason") == "length":
        messages[-1] = {"finish_reason": "length", **messages[-1]}
    return messages


def load_chats(
    paths: Sequence[str | Path],
    encoder: ChatEncoder,
    max_length: int | None = None,
    strict: bool = False,
) -> tuple[list[Encoded], RowCounts]:
    """Read conversations and encode what can be trained on.

    Args:
      paths: sources, read in this order, see `read_rows`.
      encoder: renders and masks.
      max_length: longer rows are cut.
      strict: refuse a malformed row instead of counting it.

    Returns:
      (usable rows in the order of the sources, what became of all rows).

    Raises:
      DataError: a source that cannot be read or in which no row can be used; if ``strict``, a
        malformed row, by its place.
    """
    rows: list[Encoded] = []
    counts = RowCounts()
    for path in paths:
        before, seen = len(rows), RowCounts()
        for where, row in read_rows(path):
            try:
                if isinstance(row, RowError):
                    raise row
                whole = _encode(row, where, encoder)
            except RowError as error:
                if strict:
                    raise
                counts.refuse(error)
                seen.refuse(error)
                continue
            kept = _keep(whole, max_length, counts, seen)
            if kept is not None:
                rows.append(kept)
        if len(rows) == before:
            why = ", ".join(f"{number} {reason}" for reason, number in seen.left_out().items())
            first = f"; first: {seen.places[0]}" if seen.places else ""
            raise DataError(f"no row of {path} can be trained on: {why}{first}")
    if not rows:
        raise DataError("no data: give at least one file, folder or hub data set")
    return rows, counts


def _encode(row: dict[str, Any], where: str, encoder: ChatEncoder) -> Encoded | None:
    """The row as tokens, None if it has no messages."""
    messages = conversation_of(row, where)
    if not messages:
        return None
    tools = row.get("tools") or None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise _wrong(where, '"tools" is no list of objects')
    try:
        return encoder.encode(messages, tools)
    except RowError as error:
        raise RowError(error.reason, f"{where}: {error}") from None


def _keep(
    whole: Encoded | None, max_length: int | None, counts: RowCounts, seen: RowCounts
) -> Encoded | None:
    """The row cut to the length if it can be trained on; counted in both."""
    encoded = None if whole is None else whole.cut(max_length)
    for count in (counts, seen):
        if whole is None or encoded is None:
            count.empty += 1
        # Nothing comes before token 0, so it is never predicted.
        elif len(encoded.ids) < 2:
            count.short += 1
        elif not encoded.mask[1:].any():
            count.masked += 1
        else:
            count.used += 1
            count.cut += len(encoded.ids) < len(whole.ids)
            count.tokens += len(encoded.ids)
            count.supervised += int(encoded.mask.sum())
    usable = encoded is not None and len(encoded.ids) >= 2 and bool(encoded.mask[1:].any())
    return encoded if usable else None


def _from_speakers(entries: Any, where: str) -> list[Any]:
    """ "from"/"value" entries as messages; what has a role already stays as it is."""
    if not isinstance(entries, list):
        raise _wrong(where, f'"conversations" is {type(entries).__name__}, expected a list')
    messages = []
    for entry in entries:
        if isinstance(entry, dict) and "from" in entry:
            rest = {key: value for key, value in entry.items() if key not in ("from", "value")}
            speaker = entry["from"]
            role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
            messages.append({**rest, "role": role, "content": entry.get("value")})
        else:
            messages.append(entry)
    return messages


def _answer_key(row: dict[str, Any], where: str) -> str:
    for key in ("response", "completion"):
        if key in row:
            return key
    raise RowError(
        "prompt without an answer",
        f'{where}: "prompt" without "response" or "completion"; found keys {sorted(row)}',
    )


def _paired(row: dict[str, Any], asked: Any, key: str, where: str) -> list[Message]:
    """Questions and their answers in turn, after the "system" text if there is one."""
    if key not in row:
        raise RowError(
            "prompt without an answer", f'{where}: no "{key}" beside the prompts: answer them first'
        )
    asked = [asked] if isinstance(asked, str) else asked
    said = [row[key]] if isinstance(row[key], str) else row[key]
    if not isinstance(asked, list) or not isinstance(said, list) or len(asked) != len(said):
        raise _wrong(where, f'the prompts and "{key}" are not lists of equal length')
    messages: list[Any] = []
    if isinstance(row.get("system"), str):
        messages.append({"role": "system", "content": row["system"]})
    for question, answer in zip(asked, said, strict=True):
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return messages_of({"messages": messages}, where)


def _wrong(where: str, what: str) -> RowError:
    return RowError("fields of the wrong kind", f"{where}: {what}")
