"""A background thread that runs operations one after another, in the order in which they were issued.

The thread of a `Worker` spends nearly all its time in copies, additions and waits that release the interpreter's lock,
so backward continues at the same time.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable

import torch

from zeroshard.comm.base import Work
from zeroshard.comm.queued.latch import Latch
from zeroshard.host.finalizers import Finalizer

Operation = Callable[[], None]
EXIT_GRACE_S = 5.0  # how long `Worker.close` waits for the thread to end


class Ticket:
    """The handle of an operation that was submitted to a worker."""

    __slots__ = ("_done", "_operation", "error")

    def __init__(self, operation: Operation) -> None:
        self._operation: Operation | None = operation
        self.error: BaseException | None = None
        self._done = Latch()

    def wait(self) -> None:
        """Return when the operation has ended; raise its error if it failed."""
        self._done.wait()
        if self.error is not None:
            raise self.error

    def wait_for(self, seconds: float) -> bool:
        """Return when the operation has ended, or after ``seconds``; returns whether it has ended, or failed."""
        return self._done.wait_for(seconds)

    def run(self, broken: BaseException | None) -> None:
        """Call the operation; or fail at once with ``broken``, the error of an earlier operation."""
        assert self._operation is not None
        try:
            if broken is not None:
                raise broken
            self._operation()
        except BaseException as error:  # noqa: BLE001 -- raised where the operation is waited on
            traceback.clear_frames(error.__traceback__)  # they hold tensors and messages
            self.error = error
        self._operation = None  # it holds tensors too
        self._done.open()


class Worker:
    """A thread that runs operations in issue order; after one has failed, all later ones fail with its error."""

    def __init__(self, name: str) -> None:
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._tickets,), name=name, daemon=True)
        self._thread.start()
        self._stop = Finalizer(self, _stop, self._tickets, self._thread)

    def submit(self, operation: Operation) -> Work:
        """Queue ``operation``, to be called after everything that was submitted before; return its handle.

        Raises:
            RuntimeError: the worker is closed.
        """
        if not self._stop.alive:
            raise RuntimeError("the communicator is closed")
        ticket = Ticket(operation)
        self._tickets.put(ticket)
        return ticket

    def close(self) -> None:
        """Finish the submitted operations and end the thread, waiting `EXIT_GRACE_S` at most; may be called twice."""
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
