"""The lines with which a run begins on the console, each with a label and a text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zeroshard.train.config.sizes import bandwidth_in_words, duration_in_words

# Entries of ``info`` that are not printed: the lines of ``about`` say the same in words, or whoever started it knows.
_TOLD = (
    *("step", "max_steps", "world_size", "device", "tokens_per_step", "num_params", "torch", "rows"),
    *("command", "host", "version", "commit"),
)


def start_lines(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and texts, in the order of printing.

    Args:
        info: the argument of `Observer.on_start`. Its ``about`` is a table of lines that are printed as they are, its
            ``link`` the requested and the measured speed of a slowed link.
    """
    about: Mapping[str, str] = info.get("about") or {}
    lines = list(about.items())
    for name, value in info.items():
        if name == "about" or (about and name in _TOLD):
            continue
        text = link_in_words(value) if name == "link" and value else _in_words(value)
        if text:
            lines.append((name, text))
    return lines


def link_in_words(link: Mapping[str, Any]) -> str:
    """Describe a link: ``simulated between nodes of 1 rank, 200 Mbit/s, 1 ms; measured 199.2 Mbit/s, 1.02 ms``."""
    size = link["node_size"]
    nodes = "1 rank" if size == 1 else f"{size} ranks"
    measured = _rate_and_latency(link, "achieved")
    why = link.get("why_not_comparable")
    return f"{link['mode']} between nodes of {nodes}, {_rate_and_latency(link, 'asked')}; measured {measured}" + (
        f"; not comparable: {why}" if why else ""
    )


def _rate_and_latency(link: Mapping[str, Any], which: str) -> str:
    rate = link[f"{which}_bytes_per_s"]
    return f"{bandwidth_in_words(math.inf if rate is None else rate)}, {duration_in_words(link[f'{which}_latency_s'])}"


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {in_short(each)}" for key, each in value.items())
    return in_short(value)


def in_short(value: Any) -> str:
    """Format a float in four digits, an integer with commas, anything else as ``str`` does."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
