"""Processes that work on numbered tasks, so many ahead of who takes the results, in order.

Unlike `concurrent.futures` none of them outlives this process: each waits on a pipe of its own, whose other end goes
with us, however we end. They are started afresh (spawned), because the libraries that they load keep threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from zeroshard.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers(Generic[Task, Result]):
    """``num`` processes, each of which calls ``make(*args)`` once, and what that returned for each task.

    Args:
        make: a function of a module, with arguments that can be pickled; returns what takes a task.
        args: of ``make``.
        num: processes.
    """

    def __init__(self, make: Callable[..., Callable[[Task], Result]], args: tuple[Any, ...], num: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def in_order(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Each task with its result, in the order of tasks; a few more than there are processes are under way.

        Raises:
            UserError: the first that a task raised.
            RuntimeError: a task failed otherwise, with the process's own traceback; or the process was ended.
        """
        source = enumerate(tasks)
        ahead = 4 * len(self._pipes)
        waiting: dict[int, Task] = {}
        done: dict[int, Result] = {}
        busy: dict[Connection, int] = {}
        next_out = 0
        while True:
            while next_out in done:  # before more is handed out: these make room for it
                yield waiting.pop(next_out), done.pop(next_out)
                next_out += 1
            for pipe in self._pipes:
                if pipe not in busy and len(waiting) < ahead:
                    for number, task in islice(source, 1):
                        waiting[number] = task
                        busy[pipe] = number
                        _send(pipe, task)
            if not busy:
                return
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                done[busy.pop(pipe)] = _receive(pipe)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()
            process.close()
        self._pipes, self._processes = [], []


def _send(pipe: Connection, task: Any) -> None:
    try:
        pipe.send(task)
    except OSError:
        raise _lost() from None


def _receive(pipe: Connection) -> Any:
    try:
        kind, value = pipe.recv()
    except (EOFError, OSError):
        raise _lost() from None
    if kind == "user error":
        raise value
    if kind == "failure":
        raise RuntimeError(f"a worker process failed:\n{value}")
    return value


def _lost() -> RuntimeError:
    return RuntimeError("a worker process was ended from outside; if memory ran out, use fewer by --data.workers")


def _serve(pipe: Connection, make: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever started us hears of these, and ends us
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    work: Callable[[Any], Any] | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # who started us is gone
        while True:
            task = pipe.recv()
            try:
                work = work or make(*args)
                answer = "done", work(task)
            except UserError as error:
                answer = "user error", error
            except Exception:  # noqa: BLE001 -- told where it can be shown
                answer = "failure", traceback.format_exc()
            pipe.send(answer)
