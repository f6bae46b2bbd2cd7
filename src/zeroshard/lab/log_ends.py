"""What a log says of where its run is: how it last began, and its last steps. Hundreds of runs are listed by it.

The lines between are not parsed, but looked at: each must begin and end as the trainer's do. Where one does not, all
are taken, so a line that was cut off, ran into another or was filled with zeros is found. One that is damaged inside is
found when the whole log is read.
"""

from __future__ import annotations

from typing import BinaryIO

from zeroshard.lab.metrics_log import MetricsLog

KEPT_STEPS = 20  # of a log that grows
_TAIL_BYTES = 1 << 14  # parsed of a log that was never read; some twenty lines
_PIECE_BYTES = 16 << 20  # read at once
_BEGIN = b'{"event": "'  # of a line
_BETWEEN = b"}\n" + _BEGIN  # the end of a line and the beginning of the next
_START = b'{"event": "start"'


class LogEnds(MetricsLog):
    """As `MetricsLog`, but for ``steps``, ``evaluations`` and ``checkpoints``, of which it has the last alone."""

    def _take_appended(self, file: BinaryIO) -> None:
        rest = b""
        while piece := file.read(_PIECE_BYTES):
            lines, newline, rest = (rest + piece).rpartition(b"\n")
            if not newline and len(rest) > _PIECE_BYTES:
                break  # no line of ours is as long
            self._take_lines(lines + newline)
        self.torn = bool(rest)
        for found in (self.steps, self.evaluations, self.checkpoints):
            if len(found) > 2 * KEPT_STEPS:
                for number in sorted(found)[:-KEPT_STEPS]:
                    del found[number]

    def _take_lines(self, lines: bytes) -> None:
        """Take the ends of ``lines``, or all where one looks damaged."""
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
    """Whether the first ``count`` of ``lines``, which end at ``end``, are each an event of its own, and no more."""
    begins = lines.startswith(_BEGIN) and lines.startswith(_BETWEEN, end - 2)
    return begins and lines.count(_BEGIN, 0, end) == count and lines.count(_BETWEEN, 0, end) == count - 1
