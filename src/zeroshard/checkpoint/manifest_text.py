"""The manifest's text format with its own checksum, and checks of the types and ranges of the facts in it.

The checksum is the SHA-256 of all bytes before it, so that a reader hashes the bytes that it has read:

    {"format": "zeroshard-checkpoint",
    "version": 4,
    ...
    "sha256": "of the bytes up to the comma before this line"}

The manifest of 70 billion parameters on 512 ranks has 24 MB, and serializing it again for a checksum of the facts would
take longer than all other preparations of a load.

A checksum shows that nothing was damaged, not who wrote the manifest. So the type and range of each fact are checked
before anything is computed from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

FORMAT = "zeroshard-checkpoint"
VERSION = 4
MOST_BYTES = 1 << 30  # of a manifest; some 40 times the largest that a known run writes
_ONE_PER_LINE = ("files", "tensors", "param_groups")
_END = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\}\n')
_END_BYTES = len(',\n"sha256": ""}\n') + 64
_DEEPEST = 50


def seal(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``facts`` as JSON text with its checksum, part by part; `unseal` reads it.

    Raises:
        ValueError: a number is NaN or Inf.
    """
    digest = hashlib.sha256()
    before = "{"
    for key, value in {"format": FORMAT, "version": VERSION, **facts}.items():
        for part in (f"{before}{json.dumps(key)}: ", *_lines(key, value)):
            digest.update(part.encode())
            yield part
        before = ",\n"
    yield f',\n"sha256": "{digest.hexdigest()}"}}\n'


def unseal(content: bytes) -> dict[str, Any]:
    """Return the facts in a manifest's bytes, without the checksum.

    Raises:
        ValueError: the content is not a JSON object, or does not match its own checksum; the message says which.
    """
    end = _END.fullmatch(content[-_END_BYTES:])
    if end is not None:
        if hashlib.sha256(memoryview(content)[:-_END_BYTES]).hexdigest().encode() != end[1]:
            raise ValueError("it does not match its own checksum")
        facts = _object(content)
        del facts["sha256"]
        return facts
    _object(content)
    raise ValueError("it does not match its own checksum")


def plain(value: Any) -> Any:
    """Return ``value`` if it is JSON of finite numbers and text, `_DEEPEST` levels deep at most, or raise."""
    left = [(value, 0)]
    while left:
        each, depth = left.pop()
        if depth > _DEEPEST:
            raise ValueError("it is nested too deep")
        if type(each) is dict:
            left += [(inner, depth + 1) for pair in each.items() for inner in pair]
        elif type(each) is list:
            left += [(inner, depth + 1) for inner in each]
        elif type(each) is str:
            text(each)
        elif type(each) is float and not math.isfinite(each):
            raise ValueError("it holds a number that is not finite")
    return value


def text(value: str) -> str:
    """Return ``value`` if UTF-8 can encode it, which half of a surrogate pair cannot be; else raise ValueError."""
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{short(value)} is not text") from None
    return value


def _object(content: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(content.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(facts, dict):
        raise ValueError("it does not match its own checksum")  # not an object, so it has no checksum
    return facts


def _lines(key: str, value: Any) -> Iterator[str]:
    """Yield the JSON of a value; `_ONE_PER_LINE` have one element per line, so that people and `diff` can read them."""
    if key not in _ONE_PER_LINE or not value or not isinstance(value, Mapping | list | tuple):
        yield json.dumps(value, allow_nan=False)
        return
    is_table = isinstance(value, Mapping)
    before = "{\n" if is_table else "[\n"
    for each in value.items() if is_table else value:
        name = f"{json.dumps(each[0])}: " if is_table else ""
        yield f"{before}{name}{json.dumps(each[1] if is_table else each, allow_nan=False)}"
        before = ",\n"
    yield "\n}" if is_table else "\n]"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def short(value: Any) -> str:
    """Return ``value`` as one short line of ASCII characters."""
    line = ascii(value)
    return line if len(line) <= 40 else f"{line[:37]}..."
