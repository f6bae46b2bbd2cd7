"""How long the parts of a step take, without synchronising: to measure must not make the device wait for the host.

On the CPU a span is the caller's own time. On CUDA the host only queues work; a span is then the device's time between
two events on the current stream, read once the device has passed them, be it a step later.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up seconds by name. Spans of one name add up; they may be nested and then overlap.

    Args:
        device: whose time is meant.
        enabled: False: every span costs a call and leaves nothing.
    """

    def __init__(self, device: torch.device | str, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._on_cuda = torch.device(device).type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._unread: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """Count this block under ``name``; also where it ends by an exception."""
        if not self.enabled:
            yield
        elif self._on_cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            try:
                yield
            finally:
                end.record()
                self._unread.append((name, start, end))
        else:
            began = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[name] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Seconds by name since the last `take`, of what the device has passed; the rest comes with a later one."""
        unread, self._unread = self._unread, []
        for name, start, end in unread:
            if end.query():
                self._seconds[name] += start.elapsed_time(end) / 1e3
            else:
                self._unread.append((name, start, end))
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
