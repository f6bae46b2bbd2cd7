"""Quantities as people write them: a number and its unit. A bare number is refused: nobody can tell what it means.

``5GB`` is 10^9 bytes each and ``5GiB`` 2^30; a bandwidth is bits (``400Gbit/s``) or bytes (``1.25GB/s``) a second, and
``Gb/s`` is refused, because half the world reads it as the other half's; a duration is ``5us``.
A count is a number, or one with k, M, B or T for thousands, millions, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Any

from zeroshard.errors import UserError, shown

LARGEST = 2.0**63  # what 64 bits count, and no quantity of ours comes near

_SIZES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_BANDWIDTHS = {
    **{f"{unit}/s": float(num_bytes) for unit, num_bytes in _SIZES.items()},
    **{f"{prefix}bit/s": 1000**power / 8 for power, prefix in enumerate(("", "K", "M", "G", "T"))},
}
_DURATIONS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_size(field: str, text: str) -> int:
    """Bytes in ``text``, such as ``5GB`` (10^9) or ``64MiB`` (2^20); ``field`` is named where it is no size.

    Raises:
        UserError: no number, no unit, an unknown unit, or less than one byte.
    """
    num_bytes = int(_parse(field, text, _SIZES, "a size", "5GB or 512MiB"))
    if num_bytes < 1:
        raise UserError(field, f"{text!r} is less than one byte", "give a larger size")
    return num_bytes


def parse_bandwidth(field: str, text: str) -> float:
    """Bytes a second in ``text``, such as ``400Gbit/s`` (50e9) or ``1.25GB/s``.

    Raises:
        UserError: no number, no unit, an unknown unit, or nothing a second.
    """
    found = _parse(field, text, _BANDWIDTHS, "a bandwidth", "400Gbit/s or 1.25GB/s")
    if found <= 0:
        raise UserError(field, f"{text!r} moves nothing", "give a larger bandwidth")
    return found


def parse_duration(field: str, text: str) -> float:
    """Seconds in ``text``, such as ``5us``.

    Raises:
        UserError: no number, no unit, or an unknown unit.
    """
    return _parse(field, text, _DURATIONS, "a duration", "5us or 0.1ms")


def _parse(field: str, text: str, units: dict[str, int] | dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+(?:/s)?)", text.strip())
    if match is None or match[2] not in units:
        raise UserError(field, f"{text!r} is not {what}", f"write a number and a unit, as {example}")
    found = float(match[1]) * units[match[2]]
    if found >= LARGEST:
        raise UserError(field, f"{shown(text, 40)} is too large", "give a smaller one")
    return found


def parse_count(value: Any) -> Any:
    """``1B`` as 1,000,000,000; what has no such letter is handed on as it is, for others to judge."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKMBT])", value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    count = float(match[1]) * 1000 ** ("kMBT".index(match[2].replace("K", "k")) + 1)
    return round(count) if count < LARGEST else value


def bandwidth_in_words(bytes_per_s: float) -> str:
    """``200 Mbit/s`` for 25e6 bytes a second: bits, as networks are named."""
    if bytes_per_s == inf:
        return "unlimited"
    return _in_words(bytes_per_s, {unit: size for unit, size in _BANDWIDTHS.items() if unit.endswith("bit/s")})


def duration_in_words(seconds: float) -> str:
    """``1 ms`` for 0.001 s."""
    return _in_words(seconds, _DURATIONS)


def _in_words(value: float, units: Mapping[str, float]) -> str:
    """In the largest unit that makes a number of 1 or more, else in the smallest; four digits."""
    fitting = [unit for unit, size in units.items() if value >= size * 0.99995] or [min(units, key=units.__getitem__)]
    unit = max(fitting, key=units.__getitem__)
    return f"{float(f'{value / units[unit]:.4g}'):,g} {unit}"
