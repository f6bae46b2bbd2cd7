"""Processes that work on tasks, so many ahead of who takes the results, in order.

None of them outlives this process, unlike `concurrent.futures` alone: a thread of each waits on a pipe whose other end
goes with us, however we end. They are started afresh (spawned), because the libraries that they load keep threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
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
        theirs, self._lifeline = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(num, context, _begin, (theirs, make, args))
        self._num_ahead = 4 * num

    def in_order(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Each task with its result, in the order of tasks; a few more than there are processes are under way.

        Raises:
            UserError: the first that a task raised.
            RuntimeError: a task failed otherwise, with the process's own traceback; or the process was ended.
        """
        source = iter(tasks)
        ahead: deque[tuple[Task, Future[Result]]] = deque()
        while True:
            try:
                for task in islice(source, self._num_ahead - len(ahead)):
                    ahead.append((task, self._executor.submit(_work, task)))
                if not ahead:
                    return
                task, future = ahead.popleft()
                result = future.result()
            except BrokenProcessPool:
                what = "a worker process was ended from outside; if memory ran out, use fewer by --data.workers"
                raise RuntimeError(what) from None
            yield task, result

    def close(self) -> None:
        """End the processes, in the middle of a task too."""
        self._lifeline.close()
        self._executor.shutdown(cancel_futures=True)


_make: Callable[[], Callable[[Any], Any]]  # in a worker: what `Workers` was given


def _begin(lifeline: Connection, make: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...]) -> None:
    """What a new process does before its first task."""
    global _make

    def end_with_starter() -> None:
        wait([lifeline])
        os._exit(1)

    threading.Thread(target=end_with_starter, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever started us hears of these, and ends us
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    _make = cache(lambda: make(*args))  # called by the first task, because a failure of it is told like a task's


def _work(task: Any) -> Any:
    try:
        return _make()(task)
    except UserError:
        raise
    except Exception:  # noqa: BLE001 -- not every exception can be sent; its text can
        raise RuntimeError(f"a worker process failed:\n{traceback.format_exc()}") from None
