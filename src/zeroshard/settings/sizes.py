"""Parse and print quantities with units. A bare number is refused, because its unit would be a guess.

``5GB`` is 5 * 10^9 bytes and ``5GiB`` 5 * 2^30. A bandwidth is in bits (``400Gbit/s``) or bytes (``1.25GB/s``) a
second; ``Gb/s`` is refused, because some read it as gigabits and others as gigabytes. A duration is ``5us``. A count
alone needs no unit: it is a number, optionally followed by k, M, B or T for 10^3, 10^6, 10^9 or 10^12.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Any

from zeroshard.host.errors import UserError, shown

MOST_NODES = 65_536
LARGEST = 2.0**63  # quantities from here on are refused: they do not fit into a signed 64-bit integer

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
    """Return the bytes that ``text`` means, such as ``5GB`` (10^9 each) or ``64MiB`` (2^20 each).

    Raises:
        UserError: names ``field``; no number, no unit, an unknown unit, less than one byte, or too large.
    """
    num_bytes = int(_parse(field, text, _SIZES, "a size", "5GB or 512MiB"))
    if num_bytes < 1:
        raise UserError(field, f"{text!r} is less than one byte", "give a larger size")
    return num_bytes


def parse_bandwidth(field: str, text: str) -> float:
    """Return the bytes per second that ``text`` means, such as ``400Gbit/s`` (50e9) or ``1.25GB/s``.

    Raises:
        UserError: names ``field``; no number, no unit, an unknown unit, zero, or too large.
    """
    found = _parse(field, text, _BANDWIDTHS, "a bandwidth", "400Gbit/s or 1.25GB/s")
    if found <= 0:
        raise UserError(field, f"{text!r} moves nothing", "give a larger bandwidth")
    return found


def parse_duration(field: str, text: str) -> float:
    """Return the seconds that ``text`` means, such as ``5us``.

    Raises:
        UserError: names ``field``; no number, no unit, an unknown unit, or too large.
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
    """Convert a string such as ``1B`` to 1,000,000,000; return any other value unchanged, for pydantic to check."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKMBT])", value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    count = float(match[1]) * 1000 ** ("kMBT".index(match[2].replace("K", "k")) + 1)
    return round(count) if count < LARGEST else value


def parse_nnodes(text: str) -> tuple[int, int]:
    """Parse ``nnodes`` into its least and greatest number of machines: ``"2"`` is (2, 2), ``"2:4"`` is (2, 4).

    Raises:
        UserError: ``text`` has neither form, the first number is above the second, or one is above `MOST_NODES`.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,9})(?::([1-9][0-9]{0,9}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > most or most > MOST_NODES:
        raise UserError("nnodes", f"{shown(text)} is no number of machines", "give it as 2, or as 2:4 for at least 2")
    return least, most


def bandwidth_in_words(bytes_per_s: float) -> str:
    """Format bytes per second as bits per second, the unit of network links: 25e6 is ``200 Mbit/s``."""
    if bytes_per_s == inf:
        return "unlimited"
    return _in_words(bytes_per_s, {unit: size for unit, size in _BANDWIDTHS.items() if unit.endswith("bit/s")})


def duration_in_words(seconds: float) -> str:
    """Format seconds with a fitting unit: 0.001 is ``1 ms``."""
    return _in_words(seconds, _DURATIONS)


def _in_words(value: float, units: Mapping[str, float]) -> str:
    """Format in the largest unit in which the number is 1 or more, else in the smallest unit; four digits."""
    fitting = [unit for unit, size in units.items() if value >= size * 0.99995] or [min(units, key=units.__getitem__)]
    unit = max(fitting, key=units.__getitem__)
    return f"{float(f'{value / units[unit]:.4g}'):,g} {unit}"
