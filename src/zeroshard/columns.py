"""Tables in plain text: as wide as what they hold, on a terminal and in a pipe alike, which rich's are not."""

from __future__ import annotations

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
