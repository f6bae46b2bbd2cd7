"""The watchdog for a step that hangs: every rank writes the stacks of its threads to a file, and the run ends.

The sentinel (`zeroshard.comm.wrappers.sentinel`) detects ranks that died or went silent. The watchdog is for ranks that
are alive but wait: for a lock, a disk, a data loader, or each other. If one rank waits, soon all do. So each rank
watches itself, and all write their stacks at nearly the same time, without communication.

Progress resets the limit: a completed step, a batch of an evaluation, bytes of a checkpoint that any rank has written.
Computation must progress within ``limit_s``. A disk or a compiler is allowed `PATIENCE_S` at least, because one flush
may take minutes even if a step takes milliseconds.

A Python thread writes the stacks, by `faulthandler`, then prints their folder and ends the process. A rank that is
stuck in a library while it holds the GIL is covered by `faulthandler`'s own thread, which needs no GIL. That one comes
a second later, and only if the first could not run: reading the frames of a running thread may crash the process.
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
from zeroshard.host.regular_files import open_inside

LOOKS_PER_LIMIT = 20  # checks per limit_s
TIME_TO_DUMP_S = 2.0  # from the limit to the end of the process, so that every rank has time to write its stacks
PATIENCE_S = 600.0  # time allowed for one write, flush or rename, or for compiling

Alive = Callable[[float], None]  # `Watchdog.alive`


class Watchdog:
    """Watches one rank; use it as a context manager in the main thread of a process.

    Args:
        folder: the run folder; stacks go to ``stacks/rank-00003.txt`` in it.
        limit_s: seconds that a step or a batch of an evaluation may take; 0: no limit. The first step, which may
            compile, is not watched.
        on_hang: called with a one-line message and whether this rank should print it; it must end the process.
    """

    def __init__(self, folder: Path, rank: int, limit_s: float, on_hang: Callable[[str, bool], None]) -> None:
        self._folder, self._path = folder, folder / "stacks" / f"rank-{rank:05d}.txt"
        self._rank, self._limit_s, self._on_hang = rank, limit_s, on_hang
        self._alive: tuple[float, float] | None = None  # (time of the last progress, seconds allowed until the next)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._limit_s:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._file = os.fdopen(open_inside(self._folder, self._path.relative_to(self._folder), flags), "w")
            self._thread.start()
        return self

    def alive(self, patience_s: float = 0.0) -> None:
        """Report progress. The next must come within ``limit_s``, or ``patience_s`` if that is more; inf: no limit."""
        if not self._limit_s:
            return
        limit_s = max(self._limit_s, patience_s)
        self._alive = (time.monotonic(), limit_s)
        if math.isinf(limit_s):
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(limit_s + TIME_TO_DUMP_S / 2, file=self._file)

    def _watch(self) -> None:
        dumped = None
        while not self._closed.wait(self._limit_s / LOOKS_PER_LIMIT):
            alive = self._alive
            late_s = self._late_s()
            if late_s > 0 and alive is not dumped:
                faulthandler.cancel_dump_traceback_later()
                faulthandler.dump_traceback(self._file)
                dumped = alive
            if late_s > TIME_TO_DUMP_S:
                self._on_hang(self._message(), self._rank == 0)
                return

    def _late_s(self) -> float:
        """Return the seconds by which the limit is exceeded; negative before that."""
        since_s, limit_s = self._alive or (0.0, math.inf)
        return time.monotonic() - since_s - limit_s

    def _message(self) -> str:
        limit_s = max(self._limit_s, self._alive[1] if self._alive else 0.0)
        what = f"a step has taken {limit_s:g} s (step_timeout_s)"
        if limit_s > self._limit_s:
            what = f"nothing has been computed or written for {limit_s:g} s"
        return f"{what}: the stacks of each rank are in {self._path.parent}; start again with --resume auto"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._limit_s:
            return
        if isinstance(error, PeerError) and self._late_s() > 0:
            self._on_hang(
                self._message(), True
            )  # peers are lost because this step hangs: they ended moments before this rank
        faulthandler.cancel_dump_traceback_later()
        self._closed.set()
        self._thread.join()
        is_written = os.fstat(self._file.fileno()).st_size > 0
        self._file.close()
        if not is_written:
            self._path.unlink(missing_ok=True)  # it is missing if the folder was removed
