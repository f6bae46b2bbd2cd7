"""Reads a JSON list value by value, so that a file larger than memory can be one list.

[{"text": "one"}, {"text": "two"}]        JSON lines, {"text": "one"}\n{"text": "two"}, need none of this
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from zeroshard.regular_files import json_at

_BLOCK_BYTES = 1 << 20
_SPACE = " \t\n\r\ufeff"  # and the mark that some programs write at the beginning of a file


def begins_list(file: BinaryIO) -> bool:
    """Whether the first character that is not white space begins a list."""
    while block := file.read(1 << 12):
        if text := block.lstrip(b" \t\n\r\xef\xbb\xbf"):
            return text.startswith(b"[")
    return False


def values_of_list(file: BinaryIO) -> Iterator[Any]:
    """Yield the values of the JSON list in ``file``, in order.

    Raises:
        ValueError: it is no list, or is damaged or truncated.
    """
    decoder, text, at, is_end = codecs.getincrementaldecoder("utf-8")(), "", 0, False

    def more() -> None:
        """Read on, as much as is held, so that a large value is parsed a few times and not once for each block."""
        nonlocal text, at, is_end
        block = file.read(max(_BLOCK_BYTES, len(text) - at))
        text, at, is_end = text[at:] + decoder.decode(block, final=not block), 0, not block

    def character() -> str:
        """Return the next character that is not white space, without passing it; empty at the end of the file."""
        nonlocal at
        while True:
            while at < len(text) and text[at] in _SPACE:
                at += 1
            if at < len(text) or is_end:
                return text[at : at + 1]
            more()

    if character() != "[":
        raise ValueError("it is no list")
    at += 1
    while character() != "]":
        while True:
            try:
                value, at = json_at(text, at)
                break
            except ValueError as error:
                if is_end or _is_damage(error, len(text)):
                    raise
                more()
        yield value
        after = character()
        if after == ",":
            at += 1
            if character() == "]":
                raise ValueError("its last comma is not followed by a value")
        elif after != "]":
            raise ValueError(f"a comma is missing before {after!r}" if after else "the list does not end")
    at += 1
    if after := character():
        raise ValueError(f"the list is not all of it: {after!r} follows")


def _is_damage(error: ValueError, length: int) -> bool:
    """Whether a value cannot be parsed whatever follows the first ``length`` characters of it and its surroundings."""
    if not isinstance(error, json.JSONDecodeError):
        return True
    return not error.msg.startswith("Unterminated") and error.pos + len("-Infinity") < length
