"""Sizes and counts as people write them.

A size is a number and its unit; a bare number is refused, since nobody can tell what it means. A count is a number, or
one with k, M, B or T for thousands, millions, and so on.
"""

from __future__ import annotations

import re
from typing import Any

from zeroshard.errors import UserError

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def parse_size(field: str, text: str) -> int:
    """Bytes in ``text``, such as ``5GB`` (10^9) or ``64MiB`` (2^20); ``field`` is named where it is no size.

    Raises:
        UserError: no number, no unit, an unknown unit, or less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise UserError(field, f"{text!r} is not a size", "write a number and a unit, as 5GB or 512MiB")
    num_bytes = int(float(match[1]) * _UNITS[match[2]])
    if num_bytes < 1:
        raise UserError(field, f"{text!r} is less than one byte", "give a larger size")
    return num_bytes


def parse_count(value: Any) -> Any:
    """``1B`` as 1,000,000,000; what has no such letter is handed on as it is, for others to judge."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKMBT])", value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    return round(float(match[1]) * 1000 ** ("kMBT".index(match[2].replace("K", "k")) + 1))
