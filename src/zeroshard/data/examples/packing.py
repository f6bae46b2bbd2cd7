"""Decide which examples share a row: best fit decreasing, computed on counts of lengths instead of single examples.

The longest examples are placed first, each into the row with the least room that suffices, else into a new row.
Examples of equal length and rows with equal room are placed together, so millions take a second: "Fewer Truncations
Improve Language Modeling", Ding et al. 2024, https://arxiv.org/abs/2404.10830; rows as counts by room: "Efficient
Sequence Packing", Krell et al. 2021, https://arxiv.org/abs/2107.02027.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray


def pack(lengths: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack examples into rows of at most ``seq_len`` tokens; a pure function.

    Args:
        lengths: lengths of the examples, [n], each in [1, seq_len].

    Returns:
        ``first`` [num_rows + 1]: for each row the index of its first entry in ``members``, then ``n``. ``members`` [n]:
        indices into ``lengths``, row after row. Rows, and the members of a row, are ordered by their first examples.
    """
    assert not lengths.size or (lengths.min() >= 1 and lengths.max() <= seq_len)
    row_of = _placed(lengths, seq_len)
    _, firsts = np.unique(row_of, return_index=True)  # the first example of each row
    number = np.empty(firsts.size, np.int64)
    number[np.argsort(firsts)] = np.arange(firsts.size)
    row_of = number[row_of]
    first = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.bincount(row_of))))
    return first, np.argsort(row_of, kind="stable")


def _placed(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Return the row of each example, [n]; rows are numbered in the order in which they are opened."""
    row_of = np.empty(lengths.size, np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    ordered = lengths[longest_first]
    bounds = np.flatnonzero(np.diff(ordered, prepend=-1, append=-1))
    rooms: list[int] = []  # sorted; the amounts of room that at least one row has
    rows_with: dict[int, list[NDArray[np.int64]]] = {}
    num_rows = 0
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        length, at = int(ordered[begin]), begin
        while at < end:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms.pop(place)
                rows = np.concatenate(rows_with.pop(room))
            else:
                room = seq_len
                count = -(-(end - at) // (room // length))
                rows = np.arange(num_rows, num_rows + count)
                num_rows += count
            each = room // length  # examples that fit into one row
            taken = min(end - at, each * rows.size)
            row_of[longest_first[at : at + taken]] = np.repeat(rows, each)[:taken]
            full, rest = divmod(taken, each)
            pieces = ((room - each * length, rows[:full]), (room - rest * length, rows[full : full + (rest > 0)]))
            for left, changed in (*pieces, (room, rows[full + (rest > 0) :])):
                if left and changed.size:
                    if left not in rows_with:
                        insort(rooms, left)
                        rows_with[left] = []
                    rows_with[left].append(changed)
            at += taken
    return row_of
