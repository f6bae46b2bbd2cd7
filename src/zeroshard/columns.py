"""Tables in plain text: as wide as what they hold, on a terminal and in a pipe alike, which rich's are not."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Sequence


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """A line for each row, with two spaces between cells; each column is as wide as its widest cell.

    Args:
        rows: of as many cells each.
        right: which columns stand to the right, counted from 0; the others stand to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["><"[place not in right] for place in range(len(widths))]
    return ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]


def fitted(rows: Sequence[Sequence[str]], width: int, spare: Sequence[str]) -> list[list[str]]:
    """``rows`` without as many columns as it takes to be at most ``width`` wide, if that can be; 0: any width will do.

    Args:
        rows: the first has the titles.
        width: of a line.
        spare: titles of columns that may go, the first of them first.
    """
    found = [list(row) for row in rows]
    for title in spare:
        if not width or max(map(len, columns(found))) <= width:
            break
        place = found[0].index(title)
        found = [[*row[:place], *row[place + 1 :]] for row in found]
    return found


def wrapped(text: str, width: int) -> str:
    """``text`` with its sentences broken into lines of at most ``width``; tables, which are indented, as they are."""
    lines = []
    for line in text.splitlines():
        keeps = not width or len(line) <= width or line.startswith((" ", ">"))
        broken = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines.append(line if keeps else broken.fill(line))
    return "\n".join(lines)
