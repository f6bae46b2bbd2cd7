"""Threads of the host as lanes of a race checker: work that is handed to a thread runs at once, and yet is its own.

Whoever hands it over comes before it; it comes before whoever waits for it. What does neither is unordered, whatever
the order in which the test happened to run it.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager

from zeroshard.zero.offload.executor import Executor, Update


class _Done(Future):
    """Work of a lane that is over once somebody has waited."""

    def __init__(self, lanes, clock):
        super().__init__()
        self._lanes, self.clock = lanes, clock

    def result(self, timeout=None):
        self._lanes.join(self.clock)
        return super().result(timeout)


class Lanes:
    """The threads of the host of ``bus``, a `hazards.HazardDevice`: ``bus.host`` is the one that runs now."""

    def __init__(self, bus):
        self.bus = bus
        self.ends = {}  # of updates: the clock of their lane

    def join(self, clock):
        """What runs now comes after all of this."""
        self.bus.host.clock |= clock

    @contextmanager
    def acting(self, lane):
        """What the host does in this block, it does on this lane."""
        lane.clock |= self.bus.host.clock
        before, self.bus.host = self.bus.host, lane
        try:
            yield
        finally:
            self.bus.host = before

    def pool(self, num_threads=1, **_):
        """A `ThreadPoolExecutor`, of which each thread is a lane."""
        return _Pool(self, num_threads)

    def wait(self, futures, **_):
        """As `concurrent.futures.wait`."""
        for future in futures:
            self.join(future.clock)

    def patch(self, monkeypatch, placement):
        """Have engines update on a lane."""
        lanes = self

        class OnLane(Executor):
            """The thread that updates."""

            def _begin(self, jobs):
                lane = self.lane = getattr(self, "lane", None) or lanes.bus.new_stream("executor")
                for update, run in jobs:
                    with lanes.acting(lane):
                        self._run(update, run)
                    lanes.ends[update] = Counter(lane.clock)

        wait = Update.wait

        def waited(update):
            wait(update)
            if not update.executor.is_own_thread:
                lanes.join(lanes.ends.get(update, Counter()))

        monkeypatch.setattr(placement, "Executor", OnLane)
        monkeypatch.setattr(Update, "wait", waited)


class _Pool:
    def __init__(self, lanes, num_threads):
        self._lanes = lanes
        self._threads = [lanes.bus.new_stream("thread") for _ in range(num_threads)]

    def submit(self, run, *args):
        lane = self._threads.pop(0)
        self._threads.append(lane)
        done = _Done(self._lanes, Counter())
        with self._lanes.acting(lane):
            try:
                done.set_result(run(*args))
            except OSError as error:
                done.set_exception(error)
        done.clock = Counter(lane.clock)
        return done

    def shutdown(self, wait=True):
        """Nothing runs."""
