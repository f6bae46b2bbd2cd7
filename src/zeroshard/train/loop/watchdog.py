"""A step that never ends tells where it stands: every rank writes the stacks of its threads, and the run ends.

A rank that is gone or silent is the sentinel's business (`zeroshard.comm.wrappers.sentinel`). This one is about ranks
that are there, pulse and all, and wait: for a lock, a disk, a data loader, each other. Since all of them wait when one
does, each watches itself, and all dump at nearly the same time without a word between them.

Progress feeds it: a step that is done, a batch of an evaluation, bytes of a checkpoint that any rank has written.
Computation has ``limit_s`` for that. A disk or a compiler has `PATIENCE_S` at the least: one flush may take minutes
where a step takes milliseconds.

Stacks are written by `faulthandler`, from a thread in C that needs no interpreter, so a rank that is stuck in a
library with the interpreter locked is seen too. A thread in Python then names the folder and ends the process.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from zeroshard.comm.base import PeerError
from zeroshard.regular_files import open_regular

LOOKS_PER_LIMIT = 20
TIME_TO_DUMP_S = 2.0  # that ranks give each other before the first ends
PATIENCE_S = 600.0  # that one write, flush or rename may take, or compiling

Alive = Callable[[float], None]  # `Watchdog.alive`


class Watchdog:
    """Watches one rank; use it as a context manager in the main thread of a process.

    Args:
        folder: of the run; stacks go to ``stacks/rank-00003.txt`` in it.
        rank: this one.
        limit_s: how long a step may take, or a batch of an evaluation; 0: for ever. The first step, which may compile,
            is not watched.
        on_hang: called with one line and whether this rank is the one to print it; it is to end the process.
    """

    def __init__(self, folder: Path, rank: int, limit_s: float, on_hang: Callable[[str, bool], None]) -> None:
        self._path = folder / "stacks" / f"rank-{rank:05d}.txt"
        self._rank, self._limit_s, self._on_hang = rank, limit_s, on_hang
        self._alive: tuple[float, float] | None = None  # when something was done last, and seconds for the next
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._limit_s:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "w", encoding="utf-8", opener=open_regular)
            self._thread.start()
        return self

    def alive(self, patience_s: float = 0.0) -> None:
        """Something is done: the next thing has ``limit_s``, or ``patience_s`` where that is more; inf: for ever."""
        if not self._limit_s:
            return
        limit_s = max(self._limit_s, patience_s)
        self._alive = (time.monotonic(), limit_s)
        if math.isinf(limit_s):
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(limit_s, file=self._file)

    def _watch(self) -> None:
        while not self._closed.wait(self._limit_s / LOOKS_PER_LIMIT):
            if line := self._overdue(TIME_TO_DUMP_S):
                self._on_hang(line, self._rank == 0)
                return

    def _overdue(self, by_s: float) -> str:
        """What to say where the limit has passed, and ``by_s`` more; else nothing."""
        since_s, limit_s = self._alive or (0.0, math.inf)
        if time.monotonic() - since_s <= limit_s + by_s:
            return ""
        what = f"a step has taken {limit_s:g} s (step_timeout_s)"
        if limit_s > self._limit_s:
            what = f"nothing has been computed or written for {limit_s:g} s"
        return f"{what}: where each rank stands is in {self._path.parent}; start again with --resume auto"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._limit_s:
            return
        if isinstance(error, PeerError) and (line := self._overdue(0.0)):
            self._on_hang(line, True)  # the peers have ended because the step hangs, some moments before this rank
        faulthandler.cancel_dump_traceback_later()
        self._closed.set()
        self._thread.join()
        is_written = os.fstat(self._file.fileno()).st_size > 0
        self._file.close()
        if not is_written:
            self._path.unlink(missing_ok=True)  # the folder may have been removed
