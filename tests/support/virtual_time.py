"""A clock for a GPU that is not there: streams, copies, and a host with a second thread, each with its own time.

An operation that is queued begins when its stream and the host have come to it, and lasts as long as the test says: a
forward or backward by `VirtualTime.compute`, an update on the host by its unit, a copy over the bus by its bytes. All
else takes no time. The engine is the real one, over `fake_cuda`'s tensors; `VirtualTime` takes the place of
``torch.cuda`` under `DeviceStreams`, and `executor` that of the thread of updates.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.zero.offload.executor import Executor, Update

COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)


class Line:
    """One thread of the host, or one stream of the device: all before `now` is over."""

    def __init__(self, time: VirtualTime, name: str) -> None:
        self._time, self.name, self.now = time, name, 0.0

    def wait_event(self, event: Event) -> None:
        self.now = max(self.now, event.at)


class Event:
    """A point in a stream."""

    def __init__(self, time: VirtualTime) -> None:
        self._time, self.at = time, 0.0

    def record(self, stream: Line) -> None:
        self.at = max(stream.now, self._time.thread.now)

    def synchronize(self) -> None:
        self._time.thread.now = max(self._time.thread.now, self.at)


class VirtualTime(TorchDispatchMode):
    """See the module's docstring.

    Args:
        bus_bytes_per_s: of copies between host and device, in each direction.

    Attributes:
        compute_stream: on which forward and backward run.
        thread: the host's thread that runs now: `host`, or `updates`; ``unit``: what that updates.
        updated_at: when the update of each unit was over, in the order in which they were.
    """

    def __init__(self, bus_bytes_per_s: float) -> None:
        super().__init__()
        self._bus_bytes_per_s = bus_bytes_per_s
        self.compute_stream = self._current = Line(self, "compute")
        self.host, self.updates = Line(self, "host"), Line(self, "updates")
        self.thread, self.unit = self.host, ""
        self.updated_at: list[tuple[str, float]] = []

    # -- what `DeviceStreams` takes for ``torch.cuda`` --------------------------------------------------------

    def Stream(self, device: Any = None, priority: int = 0) -> Line:
        return Line(self, "lane")

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Line:
        return self._current

    @contextmanager
    def stream(self, stream: Line):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    # -- what takes time --------------------------------------------------------------------------------------

    def compute(self, seconds: float) -> None:
        """Queue a computation on the stream that is current."""
        self._queue(seconds)

    def _queue(self, seconds: float) -> None:
        stream = self._current
        stream.now = max(stream.now, self.thread.now) + seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in COPIES:
            source = args[1] if func.overloadpacket is COPIES[1] else args[0]
            if {result.device.type, source.device.type} == {"cpu", "cuda"}:
                self._queue(source.nbytes / self._bus_bytes_per_s)
                if not ((kwargs or {}).get("non_blocking") or args[2:] == (True,)):
                    self.thread.now = max(self.thread.now, self._current.now)
        return result

    def updating(self, step: Any, seconds: Any) -> Any:
        """A class's ``step`` for one unit, which takes ``seconds(name)`` of the thread of updates."""

        def timed(twin: Any) -> Any:
            self.updates.now += seconds(self.unit)
            return step(twin)

        return timed

    def executor(self) -> tuple[type[Executor], type[Update]]:
        """Classes in place of `Executor` and `Update`, on this clock."""
        time = self

        class Updates(Executor):
            def _begin(self, jobs):
                time.updates.now = max(time.updates.now, time.thread.now)
                time.thread = time.updates
                for job in jobs:
                    time.unit = job[0].name
                    self._run(*job)
                    job[0].over_at = time.updates.now
                    time.updated_at.append((job[0].name, time.updates.now))
                time.thread = time.host

        class Timed(Update):
            over_at = 0.0

            def wait(self):
                super().wait()
                if time.thread is time.host:
                    time.host.now = max(time.host.now, self.over_at)

        return Updates, Timed
