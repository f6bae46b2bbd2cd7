"""Text for a terminal or a pipe: tables as wide as their contents, without control characters of the contents."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Sequence


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """A line for each row, with two spaces between cells; each column is as wide as its widest cell.

    Control characters in cells are spelled out, see `printable`.

    Args:
        rows: rows with the same number of cells.
        right: indices, from 0, of the columns that are aligned right; the others are aligned left.
    """
    rows = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["><"[place not in right] for place in range(len(widths))]
    return ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]


def printable(text: str) -> str:
    """``text`` with control characters spelled out (``\\x1b``): files of others must not command the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def fitted(rows: Sequence[Sequence[str]], width: int, spare: Sequence[str]) -> list[list[str]]:
    """Remove columns from ``rows`` until the table is at most ``width`` wide, as far as ``spare`` allows.

    Args:
        rows: rows of cells; the first row has the titles.
        width: most characters of a line; 0: no limit.
        spare: titles of columns that may be removed, in the order of removal.
    """
    found = [list(row) for row in rows]
    for title in spare:
        if not width or max(map(len, columns(found))) <= width:
            break
        place = found[0].index(title)
        found = [[*row[:place], *row[place + 1 :]] for row in found]
    return found


def wrapped(text: str, width: int) -> str:
    """Wrap lines of ``text`` at ``width`` (0: never), except tables: lines that begin with a space or ``>``."""
    lines = []
    for line in text.splitlines():
        keeps = not width or len(line) <= width or line.startswith((" ", ">"))
        broken = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines.append(line if keeps else broken.fill(line))
    return "\n".join(lines)
