"""Finds stalled collectives on a GPU, from another thread: on CUDA the host does not block when a collective hangs.

On CUDA `Work.wait` returns at once, and the host continues to queue work until it reads a value from the device. So a
rank whose NCCL collective never ends does not block in `Work.wait`. Instead we ask the device whether the oldest
collective in flight is complete: by its handle (``is_completed``) until the caller waits for it, and after that by an
event that was recorded on the waiting stream. (To keep the handle for longer would keep its tensors from being freed.)
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from zeroshard.comm.base import Work


class Watched:
    """A collective on a GPU: its handle until somebody waits for it, then an event that was recorded after the wait."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work: Any = work
        self._event: Any = None
        self._device = device

    def waited(self) -> None:
        """Record the event on the current stream, which now waits for the collective; drop the handle."""
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self._device))
        self._work = None

    @property
    def is_over(self) -> bool:
        """Whether the device has completed it; may be called from any thread and does not block."""
        event, work = self._event, self._work
        if event is not None:
            return event.query()
        asked = getattr(work, "is_completed", None)
        return asked is None or asked()


class InFlight:
    """The collectives that a rank has issued and its devices have not completed, in order."""

    def __init__(self) -> None:
        self._issued: deque[Watched] = deque()
        self._oldest: Watched | None = None
        self._since = 0.0
        self._lock = threading.Lock()

    def add(self, work: Work, device: torch.device) -> Watched | None:
        """Watch a collective that was just issued; None on a CPU, where the host blocks, and in CUDA graph capture."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        watched = Watched(work, device)
        self._issued.append(watched)
        return watched

    def stalled_since(self, now: float) -> float | None:
        """Return since when the oldest collective has been the oldest, as seen by calls of this method at ``now``.

        None if all collectives are complete.
        """
        with self._lock:
            while self._issued and self._issued[0].is_over:
                self._issued.popleft()
            if not self._issued:
                self._oldest = None
                return None
            if self._issued[0] is not self._oldest:
                self._oldest, self._since = self._issued[0], now
            return self._since
