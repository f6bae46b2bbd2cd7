"""Seconds by label, measured without synchronising: to measure must not make the device wait for the host.

On the CPU a span is the caller's own time. On CUDA the host only queues work; a span is then the device's time between
two events on the current stream, which are read once the device has passed them, perhaps a step later.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the seconds of each label. Spans may be nested, and then overlap."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._unread: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, label: str, *, on_cuda: bool) -> Generator[None]:
        """Count this block under ``label``, also where it ends by an exception."""
        if on_cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            try:
                yield
            finally:
                end.record()
                self._unread.append((label, start, end))
        else:
            began = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[label] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Seconds by label since the last `take`, of what the device has passed; the rest comes with a later one."""
        unread, self._unread = self._unread, []
        for label, start, end in unread:
            if end.query():
                self._seconds[label] += start.elapsed_time(end) / 1e3
            else:
                self._unread.append((label, start, end))
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
