"""Reads how a run last started and its last steps from a log, without parsing all of it: enough to list many runs.

The lines in between are only checked: each must begin and end as the trainer's lines do. If one does not, every line is
parsed, so a line that was truncated, ran into another or was filled with zeros is found. A line that is damaged inside
is found only when the whole log is read (`MetricsLog`).
"""

from __future__ import annotations

from typing import BinaryIO

from zeroshard.lab.metrics_log import MetricsLog

KEPT_STEPS = 20  # steps that are kept of a growing log
_TAIL_BYTES = 1 << 14  # bytes that are parsed of a log that was never read: about twenty lines
_PIECE_BYTES = 16 << 20  # bytes read at once
_BEGIN = b'{"event": "'  # the beginning of a line
_BETWEEN = b"}\n" + _BEGIN  # the end of a line and the beginning of the next
_START = b'{"event": "start"'


class LogEnds(MetricsLog):
    """A `MetricsLog` that keeps only the last ``steps``, ``evaluations`` and ``checkpoints``."""

    def _take_appended(self, file: BinaryIO) -> None:
        rest = b""
        while piece := file.read(_PIECE_BYTES):
            lines, newline, rest = (rest + piece).rpartition(b"\n")
            if not newline and len(rest) > _PIECE_BYTES:
                break  # the trainer writes no line as long as this
            self._take_lines(lines + newline)
        self.torn = bool(rest)
        for found in (self.steps, self.evaluations, self.checkpoints):
            if len(found) > 2 * KEPT_STEPS:
                for number in sorted(found)[:-KEPT_STEPS]:
                    del found[number]

    def _take_lines(self, lines: bytes) -> None:
        """Parse the last ``start`` event and the last lines of ``lines``, or every line if one looks damaged."""
        tail = lines.find(b"\n", len(lines) - _TAIL_BYTES) + 1 if len(lines) > _TAIL_BYTES else 0
        skipped = lines[:tail]
        count = skipped.count(b"\n")
        if skipped and _look_whole(lines, tail, count):
            start = skipped.rfind(_START)
            if start >= 0 and not self._take(skipped[start : skipped.index(b"\n", start)]):
                self._bad.append(self._num_lines + skipped.count(b"\n", 0, start) + 1)
            self._pass(skipped, count)
        else:
            tail = 0
        for line in lines[tail:].split(b"\n")[:-1]:
            self._take_whole(line + b"\n")


def _look_whole(lines: bytes, end: int, count: int) -> bool:
    """Whether ``lines[:end]`` looks like ``count`` undamaged lines, each of them exactly one event."""
    begins = lines.startswith(_BEGIN) and lines.startswith(_BETWEEN, end - 2)
    return begins and lines.count(_BEGIN, 0, end) == count and lines.count(_BETWEEN, 0, end) == count - 1
