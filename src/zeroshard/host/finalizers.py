"""`Finalizer`: what a dropped object leaves behind is closed, and never inside the garbage collector.

The collector runs wherever Python allocates: in a function that holds one of our locks, or in `threading.Thread.start`,
which holds a lock of the interpreter that `Thread.join` needs. What it calls there may not wait, join, lock or work: it
may wait for its own thread. So it only hands over what is to be closed:

    the owner is dropped  ->  put in a queue  ->  one thread closes, in this order

`queue.SimpleQueue.put` is made for that: Python documents it as reentrant, for use in destructors and callbacks of weak
references. The thread is started before it is needed, with the first finalizer, as a collector cannot start one, and
ends with the last. A process that ends closes what is left, the newest first. A fork has no part in what its parent
opened: there it is neither closed nor in use (`Finalizer.alive`).
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

EXIT_GRACE_S = 5.0  # how long the end of the process waits for the thread, which may be closing something


class Finalizer:
    """Calls ``close(*args)`` once: when it is called, soon after ``owner`` was dropped, or when the process ends.

    Args:
        owner: the object; it can be referenced weakly.
        close: called by whoever calls the finalizer, or on a thread that does nothing else; it may wait and lock.
        args: what ``close`` takes. They live until it has returned, and may not refer to ``owner``.
    """

    def __init__(self, owner: object, close: Callable[..., object], *args: Any) -> None:
        self._close, self._args = close, args
        _at_ends()
        with _lock:
            _start_thread()
            _alive[self] = weakref.ref(owner, lambda _: _dropped.put(self))

    @property
    def alive(self) -> bool:
        """Whether ``close`` was not called yet; False in a fork of the process."""
        return self in _alive

    def __call__(self) -> None:
        """Close now, unless that was done; raises what ``close`` raises."""
        self.close_once()
        if not _alive:
            settle()

    def close_once(self) -> None:
        """The same, but the thread may yet be there after the last one."""
        if _alive.pop(self, None) is not None:  # one operation: of several threads one closes
            try:
                self._close(*self._args)
            finally:
                self._args = ()


def settle() -> None:
    """Return once all that was dropped until now is closed; who opens the same file, say, calls it before.

    It waits, and so is nothing for a finalizer. On the thread that closes it returns at once.
    """
    over = threading.Event()
    with _lock:
        thread = _thread
        if thread is None or thread is threading.current_thread():
            return
        _dropped.put(over)
    over.wait()
    if _thread is not thread:
        thread.join()


_alive: dict[Finalizer, weakref.ref[Any]] = {}  # the oldest first
_dropped: queue.SimpleQueue[Finalizer | threading.Event] = queue.SimpleQueue()
_lock = threading.Lock()  # of the next one; nothing that the collector calls takes it
_thread: threading.Thread | None = None


def _start_thread() -> None:
    global _thread
    if _thread is None:
        thread = threading.Thread(target=_close_dropped, name="zeroshard-finalizers", daemon=True)
        thread.start()
        _thread = thread


def _close_dropped() -> None:
    global _thread
    ends = False
    while not ends:
        each = _dropped.get()
        if isinstance(each, Finalizer):
            try:
                each.close_once()
            except BaseException:  # noqa: BLE001 -- nobody called it: reported as any thread's, and the next is closed
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        with _lock:
            ends = not _alive and _dropped.empty()
            _thread = None if ends else _thread
        if isinstance(each, threading.Event):
            each.set()  # after the decision: who waited for the last one also waits for the thread's end
        del each  # it holds what was closed


@cache
def _at_ends() -> None:
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_in_fork)


def _close_all() -> None:
    """At the end of the process: a thread that returned from C++ even later would abort it."""
    for each in reversed(list(_alive)):
        each.close_once()
    if (thread := _thread) is not None:
        _dropped.put(threading.Event())
        thread.join(EXIT_GRACE_S)


def _in_fork() -> None:
    global _alive, _dropped, _lock, _thread
    _alive, _dropped, _lock, _thread = {}, queue.SimpleQueue(), threading.Lock(), None
