"""Lines of help that fit the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

_WIDEST, _NARROWEST = 100, 40  # columns; longer lines are hard to read, and shorter ones hold no word beside a flag


def help_width() -> int:
    """Columns of a help: the terminal's, 80 in a pipe, `_WIDEST` at the most."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def wrapped(text: str, indent: int = 0) -> list[str]:
    """``text`` in lines of `help_width`, all but the first after ``indent`` spaces."""
    return textwrap.wrap(text, help_width(), subsequent_indent=" " * indent, break_on_hyphens=False)


def named(items: Iterable[tuple[str, str]], name_width: int) -> list[str]:
    """Lines of names in ``name_width`` columns and, wrapped beside them, what they are; two spaces before all."""
    lines: list[str] = []
    for name, text in items:
        start, rest = f"  {name:<{name_width}}", " " * (name_width + 2)
        lines += textwrap.wrap(text, help_width(), initial_indent=start, subsequent_indent=rest, break_on_hyphens=False)
    return lines


def usage(words: str) -> str:
    """``usage: zeroshard WORDS``, wrapped below its first word."""
    return "\n".join(wrapped(f"usage: zeroshard {words}", indent=len("usage: ")))
