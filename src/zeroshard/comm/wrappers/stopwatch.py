"""Measures seconds by label without synchronising: measuring must not make the device wait for the host.

On the CPU a span is the caller's wall time. On CUDA the host only launches work, so a span is the device's time between
two events on the current stream. The events are read once the device has reached them, perhaps a step later.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the seconds of each label, on ``device``. Spans may be nested; nested seconds then count in both."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._unread: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, label: str, device: torch.device | None = None) -> Generator[None]:
        """Add the time of this block to ``label``, even if it raises; ``device``: another than the stopwatch's."""
        if (device or self._device).type == "cuda":
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

    def take_seconds(self) -> dict[str, float]:
        """Seconds by label since the last call, of spans that the device has finished; the others come later."""
        unread, self._unread = self._unread, []
        for label, start, end in unread:
            if end.query():
                self._seconds[label] += start.elapsed_time(end) / 1e3
            else:
                self._unread.append((label, start, end))
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
