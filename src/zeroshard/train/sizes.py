"""Sizes as people write them: a number and its unit. A bare number is refused, since nobody can tell what it means."""

from __future__ import annotations

import re

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
