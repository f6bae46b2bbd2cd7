"""Collectives that a GPU has not got past yet, watched from another thread: a stall that no wait of the host shows.

On CUDA `Work.wait` returns at once, and the host goes on to queue work until it reads a number somewhere. So a rank
whose NCCL never ends sits in no wait. What tells is the device: of the oldest collective under way it is asked whether
it is over, by the handle (`is_completed`) as long as nobody has waited for it, and from then on by an event on the
stream that waits. (A handle that was waited for would keep its tensors from being freed.)
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from zeroshard.comm.base import Work


class Watched:
    """A collective on a device: its handle until somebody waits, then an event behind the wait."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work: Any = work
        self._event: Any = None
        self._device = device

    def waited(self) -> None:
        """The current stream waits for the collective now."""
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self._device))
        self._work = None

    @property
    def is_over(self) -> bool:
        """Whether the device is past it; asked from any thread, and nothing waits."""
        event, work = self._event, self._work
        if event is not None:
            return event.query()
        asked = getattr(work, "is_completed", None)
        return asked is None or asked()


class UnderWay:
    """What a rank has issued and its devices have not got past, in order."""

    def __init__(self) -> None:
        self._issued: deque[Watched] = deque()
        self._oldest: Watched | None = None
        self._since = 0.0
        self._lock = threading.Lock()

    def add(self, work: Work, device: torch.device) -> Watched | None:
        """Watch what was issued now; None on a CPU, where the host waits, and while a CUDA graph is captured."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        watched = Watched(work, device)
        self._issued.append(watched)
        return watched

    def stalled_since(self, now: float) -> float | None:
        """Since when the oldest collective has been the oldest, as far as those who ask know; None: all are over."""
        with self._lock:
            while self._issued and self._issued[0].is_over:
                self._issued.popleft()
            if not self._issued:
                self._oldest = None
                return None
            if self._issued[0] is not self._oldest:
                self._oldest, self._since = self._issued[0], now
            return self._since
