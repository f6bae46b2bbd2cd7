"""Worker processes that return results in the order of their tasks.

No worker outlives this process, which `concurrent.futures` alone does not guarantee: a thread of each worker waits on a
pipe whose other end closes when this process ends, however it ends. Workers are spawned rather than forked, because the
libraries that they load keep threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_order(
    make: Callable[..., Callable[[Task], Result]], args: tuple[Any, ...], tasks: Iterable[Task], num: int
) -> Generator[Result]:
    """Yield the results of ``num`` processes in the order of tasks; at most four tasks per process are in flight.

    Closing the generator ends the processes, even in the middle of a task.

    Args:
        make: a module-level function; each process calls it once, and the callable that it returns with each task.
        args: picklable arguments of ``make``.

    Raises:
        Exception: a task raised it; its cause has the worker's traceback.
        RuntimeError: a worker was killed.
    """
    context = multiprocessing.get_context("spawn")
    theirs, lifeline = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(num, context, _begin, (theirs, make, args))
    ahead: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            ahead.append(executor.submit(_work, task))
            if len(ahead) == 4 * num:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool:
        what = "a worker process was ended from outside; if memory ran out, use fewer by --data.workers"
        raise RuntimeError(what) from None
    finally:
        lifeline.close()
        executor.shutdown(cancel_futures=True)


_make: Callable[[], Callable[[Any], Any]]  # in a worker: returns the callable for tasks


def _begin(lifeline: Connection, make: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...]) -> None:
    """Initialize a new worker process."""
    global _make

    def end_with_starter() -> None:
        wait([lifeline])
        os._exit(1)

    threading.Thread(target=end_with_starter, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles these and ends its workers
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel
    _make = cache(lambda: make(*args))  # the first task calls it, so that its failure is reported like a task's


def _work(task: Any) -> Any:
    return _make()(task)
