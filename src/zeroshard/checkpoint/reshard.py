"""Which saved bytes make up a wanted piece: a pure function that intersects intervals.

A tensor is saved as pieces ``[start, stop)`` of its flattened form, one or more per rank. Another world size or another
stage needs other pieces. Neither side needs to know the other's ranks:

    saved     |-----0-----|-----1-----|--2--|
    wanted          |---------------|
    copies          (0, from 6, 5), (1, from 0, 10)

The functions here take and return integers only: no tensors, no files, no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[int, int]  # [start, stop) in elements of the flattened unsharded tensor


@dataclass(frozen=True)
class Copy:
    """``target[target_offset : target_offset + length] = pieces[piece][source_offset : ... + length]``."""

    piece: int
    source_offset: int
    length: int
    target_offset: int


def plan_copies(saved: Sequence[Interval], wanted: Interval) -> list[Copy]:
    """Return the copies that fill ``wanted`` from the pieces ``saved``, each element exactly once, in order.

    The pieces may come in any order and may overlap (replicas): at each point the one that reaches furthest is used.

    Raises:
        ValueError: some element of ``wanted`` is in no piece; the error names the first missing interval.
    """
    position, stop = wanted
    order = sorted(range(len(saved)), key=lambda index: saved[index])
    copies: list[Copy] = []
    best, cursor = -1, 0
    while position < stop:
        while cursor < len(order) and saved[order[cursor]][0] <= position:
            candidate = order[cursor]
            if best < 0 or saved[candidate][1] > saved[best][1]:
                best = candidate
            cursor += 1
        if best < 0 or saved[best][1] <= position:
            next_start = saved[order[cursor]][0] if cursor < len(order) else stop
            raise ValueError(f"elements [{position}, {min(next_start, stop)}) were not saved")
        length = min(saved[best][1], stop) - position
        copies.append(Copy(best, position - saved[best][0], length, position - wanted[0]))
        position += length
    return copies


def check_tiling(pieces: Sequence[Interval], numel: int) -> None:
    """Check that the pieces cover ``[0, numel)`` exactly once: no gap, no overlap, nothing outside.

    Raises:
        ValueError: they do not; the error names the first element where the tiling breaks.
    """
    position = 0
    for start, stop in sorted(piece for piece in pieces if piece[0] != piece[1]):
        if start > position:
            raise ValueError(f"elements [{position}, {start}) are in no piece")
        if start < position:
            raise ValueError(f"elements from {start} are in two pieces")
        position = stop
    if position != numel:
        raise ValueError(f"the pieces end at {position}, the tensor at {numel}")
