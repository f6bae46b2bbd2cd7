"""Formats help texts so that their lines fit the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

_WIDEST, _NARROWEST = 100, 40  # columns; longer lines are hard to read, shorter ones have no room beside a flag


def help_width() -> int:
    """Width of a help text in columns: the terminal's, or 80 in a pipe; from `_NARROWEST` to `_WIDEST`."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Wrap ``text`` into lines of `help_width`; all but the first are indented by ``indent`` spaces."""
    return textwrap.wrap(text, help_width(), subsequent_indent=" " * indent, break_on_hyphens=False)


def named(items: Iterable[tuple[str, str]], name_width: int) -> list[str]:
    """Lines of names, ``name_width`` columns wide, with their descriptions wrapped beside them; indented by two."""
    lines: list[str] = []
    for name, text in items:
        start, rest = f"  {name:<{name_width}}", " " * (name_width + 2)
        lines += textwrap.wrap(text, help_width(), initial_indent=start, subsequent_indent=rest, break_on_hyphens=False)
    return lines


def usage(words: str) -> str:
    """``usage: zeroshard WORDS``, wrapped, with further lines indented below ``zeroshard``."""
    return "\n".join(wrapped(f"usage: zeroshard {words}", indent=len("usage: ")))
