"""Exposed communication: how long computation stood still for it, which is all of it that costs anything.

[Note: Two clocks]
    Where tensors are on the CPU, the caller's own thread is what stands still: in the call that issues an operation,
    and in `Work.wait`. On CUDA neither blocks the host; the stream that computes is what waits, between two events
    recorded on it before and after `Work.wait`. Events are read once the device has passed them, be it a step later,
    and nobody waits for that: measuring synchronises nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch

from zeroshard.comm.labels import CONTROL


class Exposed:
    """Collects the seconds that a caller's computation stood still, by label and phase.

    A label is the scope under which an operation was issued, and where it was waited for: ``blocks.3/weights/backward``
    inside autograd's backward, else ``blocks.3/weights/forward``. Control messages are all one, ``control``.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._unread: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, label: str, device: torch.device, *, issuing: bool = False) -> Generator[None]:
        """Count the time that this block has computation on ``device`` stand still; ``issuing``: it does not wait."""
        if device.type == "cuda":
            if issuing:
                yield
                return
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._unread.append((with_phase(label), start, end))
            return
        began = time.perf_counter()
        yield
        self._seconds[with_phase(label)] += time.perf_counter() - began

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


def by_kind(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sums over units: ``weights/forward``, ``weights/backward``, ``grads/backward``, ``control``, ..."""
    total: defaultdict[str, float] = defaultdict(float)
    for label, value in seconds.items():
        total["/".join(label.split("/")[-2:])] += value
    return dict(total)


def with_phase(label: str) -> str:
    """A scope's label with what autograd is doing now; ``control`` stays one."""
    if label == CONTROL:
        return label
    phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
    return f"{label or 'other'}/{phase}"
