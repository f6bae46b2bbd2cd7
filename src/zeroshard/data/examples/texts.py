"""Turn a row into text, and mark the characters that the model is to write: these count in the loss.

chat     ``messages``: a list of {"role": ..., "content": ...}; the assistant's turns count, as the template ends them
prompt   ``prompt`` and ``completion``: two texts; the completion counts
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.data.chat_templates import OpenTemplate
from zeroshard.data.template_worker import Span
from zeroshard.host.errors import UserError, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROW = 'write each row as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True)
class ExampleText:
    """One example."""

    text: str  # the complete text
    spans: tuple[Span, ...]  # ranges of characters ``[begin, end)`` that count, in order
    where: str  # the row that it comes from, for error messages


Row = Mapping[str, Any]
Rows = Iterable[tuple[str, Row]]  # each with a description of its place


def texts_of_chats(rows: Rows, template: OpenTemplate, column: str) -> Iterator[tuple[Row, ExampleText]]:
    """Yield the rows, of which some are taken ahead, with the text of the conversation in ``column``.

    Raises:
        UserError: it is no conversation, or the template refuses it; names the row.
    """
    ahead: deque[tuple[str, Row]] = deque()

    def conversations() -> Iterator[tuple[str, list[dict[str, Any]]]]:
        for where, row in rows:
            ahead.append((where, row))
            yield where, _checked(row[column], where, column)

    for text, spans in template.render_with_spans(conversations()):
        where, row = ahead.popleft()
        _require_unicode(text, where)
        found = tuple((begin, end) for begin, end in spans if end > begin)
        if not found:
            what = f"{template.origin} leaves nothing of the assistant's turns in {where}"
            raise UserError("data.template", what, "correct the row, or give another by --data.template FILE")
        yield row, ExampleText(text, found, where)


def texts_of_pairs(rows: Rows, prompt: str, completion: str) -> Iterator[tuple[Row, ExampleText]]:
    """Yield the rows with the text of two of their columns; raise UserError, which names the row, if it is none."""
    for where, row in rows:
        parts = []
        for setting, column in (("data.prompt", prompt), ("data.completion", completion)):
            if not isinstance(row[column], str):
                what = f"{column!r} in {where} is {_kind(row[column])}, not text"
                raise UserError(setting, what, "name columns of text; lists of messages are --data.format chat")
            parts.append(row[column])
        if not parts[1]:
            raise UserError("data.completion", f"{completion!r} in {where} is empty", "leave the row out")
        text = "".join(parts)
        _require_unicode(text, where)
        yield row, ExampleText(text, ((len(parts[0]), len(text)),), where)


def _checked(messages: object, where: str, column: str) -> list[dict[str, Any]]:
    """Return the messages if they are a valid conversation, without a table's empty fields; else raise UserError."""
    if not isinstance(messages, list):
        raise UserError("data.messages", f"{column!r} in {where} is {_kind(messages)}, not a list of messages", _ROW)
    if not messages:
        raise UserError("data.messages", f"the conversation in {where} is empty", "leave the row out")
    found = []
    for number, message in enumerate(messages, start=1):
        which = f"message {number} in {where}"
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise UserError("data.messages", f"{which} has no role and content", _ROW)
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise UserError("data.messages", f"{which} has the role {shown(role)}", f"use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            what = f"the content of {which} is {_kind(content)}, not text"
            raise UserError("data.messages", what, "give text: images and calls of tools are not trained on")
        if role == "assistant" and not content:
            raise UserError("data.messages", f"the content of {which} is empty", "leave the message or the row out")
        found.append({key: value for key, value in message.items() if value is not None})
    if all(message["role"] != "assistant" for message in found):
        what = f"the conversation in {where} has no turn of the assistant, and so nothing to learn"
        raise UserError("data.messages", what, "leave the row out")
    return found


def _require_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("data.path", f"{where} holds half of a surrogate pair, which is no text", "remove it") from None


def _kind(value: object) -> str:
    return "empty (null)" if value is None else f"a {type(value).__name__}"
