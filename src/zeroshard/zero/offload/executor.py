"""`Executor`: the thread that updates units, in the order of the next forward, after ``step()`` has returned.

    optimizer.step()    settles what the update is: gradients, clip factor, settings; then `Executor.arm`
    executor            update 0 | update 1 | update 2 | ...
    next forward          gather 0, forward 0 | gather 1, forward 1 | ...     gather k waits for update k

[Note: Who waits]
    Whatever touches the masters, states or gradients of a group waits for that group's `Update`, or for all of them:
    gathers, the next step, loads, saves, clips, edits of the stage. So all see the step complete, and the bits do not
    depend on when the thread runs. What the update reads was copied when it was armed (settings of param groups), or
    waits before it is changed (gradients).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch


class Failure(NamedTuple):
    """Why an update is not complete; of an error of a disk also its number and the file."""

    text: str
    errno: int | None = None
    path: str | None = None

    @classmethod
    def of(cls, name: str, error: BaseException) -> Failure:
        """Describe what the update of the unit ``name`` has raised."""
        text = str(error).splitlines()[0] if str(error) else "no message"
        todo = "units after it keep their weights from before the step; load a checkpoint"
        text = f"step: the update of unit {name} failed: {type(error).__name__}: {text}; {todo}"
        of_disk = error if isinstance(error, OSError) else error.__cause__  # of a `UserError`: the disk is full
        if isinstance(of_disk, OSError) and of_disk.errno is not None:
            return cls(text, of_disk.errno, str(of_disk.filename))
        return cls(text)

    def error(self) -> OSError | RuntimeError:
        """An exception of its own for each thread that raises it."""
        return RuntimeError(self.text) if self.errno is None else OSError(self.errno, self.text, self.path)


class Update:
    """The update of one group that may be under way, and by which others wait for it."""

    def __init__(self, name: str, executor: Executor) -> None:
        self.name, self.executor = name, executor
        self._over = threading.Event()
        self._over.set()
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._failure: Failure | None = None

    @property
    def pending(self) -> bool:
        """Whether it was armed and is not over."""
        return not self._over.is_set()

    def wait(self) -> None:
        """Wait until it is over; at once on the executor's own thread.

        Raises:
            RuntimeError: it, or one before it, has failed: weights of one step and of the next are mixed.
            OSError: the same, because of a disk.
        """
        if not self._over.is_set() and not self.executor.is_own_thread:
            self.executor.wait(self)
        if self._failure is not None:
            raise self._failure.error()

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` once no update is under way: now, or on the executor's thread."""
        with self._lock:
            if self.pending:
                self._then.append(action)
                return
        action()

    def begin(self) -> None:
        """Record that it was armed."""
        self._over.clear()

    def end(self, failure: Failure | None) -> None:
        """Record that it is over; ``failure``: why it is not complete."""
        with self._lock:
            actions, self._then = self._then, []
            for action in actions:
                action()
            self._failure = failure
            self._over.set()

    def wait_for_end(self) -> None:
        """Block until `end` was called."""
        self._over.wait()


Job = tuple[Update, Callable[[], None]]


class Executor:
    """Runs the updates of one engine, one after another, on a thread of its own.

    The thread ends with the engine, or with the interpreter, which waits for updates under way; so does a fork.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._armed: Sequence[Update] = ()
        self._thread: int | None = None
        self._failure: Failure | None = None  # of an update: none runs after it
        self.at_once = False  # whether updates run before `arm` returns, on the caller's thread, where one can measure
        _at_forks()
        _executors.add(self)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is an update."""
        return threading.get_ident() == self._thread

    def arm(self, jobs: Sequence[Job]) -> None:
        """Begin to run ``jobs`` in their order, once earlier ones are over; returns at once."""
        self.drain()
        self._armed = [update for update, _ in jobs]
        for update in self._armed:
            update.begin()
        if jobs:
            self._begin(jobs)

    def _begin(self, jobs: Sequence[Job]) -> None:
        if self.at_once:
            self._walk(jobs)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-update")
        self._pool.submit(self._walk, jobs)

    def _walk(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._run(*job)

    def _run(self, update: Update, run: Callable[[], None]) -> None:
        """Run the next update on this thread, unless one before it has failed."""
        self._thread = threading.get_ident()
        try:
            if self._failure is None:
                with torch.no_grad():
                    run()
        except BaseException as error:  # noqa: BLE001 -- whoever touches the weights next raises it
            self._failure = Failure.of(update.name, error)
        finally:
            self._thread = None
            update.end(self._failure)

    def wait(self, update: Update) -> None:
        """Block until ``update``, which was armed, is over."""
        update.wait_for_end()

    def drain(self) -> None:
        """Wait for all updates; raises as `Update.wait`."""
        if not self.is_own_thread:
            for update in self._armed:
                update.wait()

    def before_fork(self) -> None:
        """Wait for all updates, which no thread would run in the child."""
        if not self.is_own_thread:
            for update in self._armed:
                if update.pending:
                    self.wait(update)

    def in_child(self) -> None:
        """A forked process has no threads: start one when it is needed."""
        self._pool = None


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


@cache
def _at_forks() -> None:
    def before() -> None:
        for executor in list(_executors):
            executor.before_fork()

    def after() -> None:
        for executor in list(_executors):
            executor.in_child()

    os.register_at_fork(before=before, after_in_child=after)
