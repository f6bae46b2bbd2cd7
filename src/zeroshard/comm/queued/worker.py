"""Operations that run behind their caller, one after another, in the order in which they were issued.

A `Worker` calls them on a thread of its own. That thread copies, adds and sleeps outside the interpreter's lock nearly
all the time, so that backward runs on beside it.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable

import torch

from zeroshard.comm.base import Work

Operation = Callable[[], None]
EXIT_GRACE_S = 5.0  # how long the end of the process waits for the operation under way


class Ticket:
    """The handle of an operation that a worker has taken."""

    __slots__ = ("_done", "_ended_at_s", "_listeners", "_operation", "error")

    def __init__(self, operation: Operation) -> None:
        self._operation: Operation | None = operation
        self.error: BaseException | None = None
        self._done = threading.Event()
        self._ended_at_s = 0.0  # once it is done
        self._listeners: list[Callable[[float], None]] = []

    def add_done_callback(self, ended: Callable[[float], None]) -> None:
        """Call ``ended`` once the operation has ended, on the worker's thread; here where it has."""
        self._listeners.append(ended)
        if self._done.is_set():
            self._call_back()

    def _call_back(self) -> None:
        while self._listeners:
            try:
                ended = self._listeners.pop()  # both threads may come here: one of them gets it
            except IndexError:
                return
            ended(self._ended_at_s)

    def wait(self) -> None:
        """Return when the operation has ended; raise what went wrong in it."""
        self._done.wait()
        if self.error is not None:
            raise self.error

    def run(self, broken: BaseException | None) -> None:
        """Call the operation, or end at once with ``broken``, the error of an earlier one."""
        assert self._operation is not None
        try:
            if broken is not None:
                raise broken
            self._operation()
        except BaseException as error:  # noqa: BLE001 -- raised where the operation is waited on
            traceback.clear_frames(error.__traceback__)  # they hold tensors and messages
            self.error = error
        self._operation = None  # so are the tensors it was given
        self._ended_at_s = time.perf_counter()
        self._done.set()
        self._call_back()


class Worker:
    """A thread that runs operations in issue order; after one has failed, all later ones fail with its error.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._tickets,), name=name, daemon=True)
        self._thread.start()
        # also called at interpreter exit: a thread that comes back from C++ after that would abort the process
        self._stop = weakref.finalize(self, _stop, self._tickets, self._thread)

    def submit(self, operation: Operation) -> Work:
        """Call ``operation`` after all that was submitted before.

        Raises:
            RuntimeError: the worker is closed.
        """
        if not self._stop.alive:
            raise RuntimeError("the communicator is closed")
        ticket = Ticket(operation)
        self._tickets.put(ticket)
        return ticket

    def close(self) -> None:
        """Finish what was submitted and end the thread; harmless twice."""
        self._stop()


def _run(tickets: queue.SimpleQueue[Ticket | None]) -> None:
    broken: BaseException | None = None
    with torch.no_grad():  # a thread starts with gradients on, and flat buffers may be parameters
        while (ticket := tickets.get()) is not None:
            ticket.run(broken)
            broken = ticket.error
            del ticket


def _stop(tickets: queue.SimpleQueue[Ticket | None], thread: threading.Thread) -> None:
    tickets.put(None)
    if thread is not threading.current_thread():
        thread.join(EXIT_GRACE_S)
