"""Operations that run behind their caller, one after another, in the order in which they were issued.

An operation is an iterator over the things that it waits for: it does what it can, yields a handle, and goes on when
that handle's wait has returned. A `Worker` drives such iterators on a thread of its own. That thread sleeps in gloo
or in the kernel nearly all the time, without the interpreter's lock, so that backward runs on beside it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator

import torch

from zeroshard.comm.base import Work

Steps = Iterator[Work]
EXIT_GRACE_S = 5.0  # how long the end of the process waits for the operation under way


class Ticket:
    """The handle of an operation that a worker has taken."""

    __slots__ = ("_done", "error", "steps")

    def __init__(self, steps: Steps) -> None:
        self.steps: Steps | None = steps
        self.error: BaseException | None = None
        self._done = threading.Event()

    def wait(self) -> None:
        """Return when the operation has ended; raise what went wrong in it."""
        self._done.wait()
        if self.error is not None:
            raise self.error

    def run(self, broken: BaseException | None) -> None:
        """Drive the operation to its end, or to ``broken``, the error of an earlier one, at once."""
        assert self.steps is not None
        try:
            if broken is not None:
                raise broken
            for work in self.steps:
                work.wait()
        except BaseException as error:  # noqa: BLE001 -- raised where the operation is waited on
            self.error = error
        self.steps = None  # the tensors are the caller's again
        self._done.set()


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

    def submit(self, steps: Steps) -> Work:
        """Run ``steps`` after all that was submitted before.

        Raises:
            RuntimeError: the worker is closed.
        """
        if not self._stop.alive:
            raise RuntimeError("the communicator is closed")
        ticket = Ticket(steps)
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
