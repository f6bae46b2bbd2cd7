"""The runs below a folder. A run is read again when a file of it has changed, and else remembered.

Of a log only what was appended is read. Many runs that nobody has read yet are read over several calls, the newest
first, so that a page has something to show at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from zeroshard.lab.metrics_log import MetricsLog
from zeroshard.lab.run_folders import CONFIG, METRICS, SUMMARY, RunResult, find_runs, is_held, locks_held, read_run
from zeroshard.train.state.lock import LOCK

_FILES = (CONFIG, METRICS, SUMMARY)
_Signature = tuple[tuple[int, int, int] | None, ...]


class Watch:
    """Runs below ``root``, and nothing else: a link that leads out of it is not followed.

    Safe to call from several threads.
    """

    def __init__(self, root: str | Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.num_unread = 0  # runs that the last call of `runs` had no time for
        self.root = Path(root).resolve()
        self._known: dict[Path, tuple[_Signature, bool, RunResult]] = {}
        self._logs: dict[Path, MetricsLog] = {}
        self._lock = threading.Lock()

    def runs(self, budget_s: float | None = None) -> dict[str, RunResult]:
        """Runs by their path below the root, in order of path.

        Args:
            budget_s: seconds after which no further run is read for the first time, though always one; None: all are.
        """
        with self._lock:
            held = locks_held()
            ends = None if budget_s is None else self._clock() + budget_s
            folders = [folder for folder in find_runs(self.root) if self._is_inside(folder)]
            new = sorted((folder for folder in folders if folder not in self._known), key=_wrote_ns, reverse=True)
            num_read = 0
            for folder in new:
                if num_read and ends is not None and self._clock() >= ends:
                    break
                self._refresh(folder, held)
                num_read += 1
            unread = set(new[num_read:])
            self.num_unread = len(unread)
            found: dict[str, RunResult] = {}
            for folder in folders:
                if folder in unread:
                    continue
                name = folder.relative_to(self.root).as_posix()
                found[self.root.name if name == "." else name] = self._refresh(folder, held)
            self._known = {run.folder: self._known[run.folder] for run in found.values()}
            self._logs = {run.folder: self._logs[run.folder] for run in found.values()}
            return found

    def _refresh(self, folder: Path, held: frozenset[tuple[int, int, int]]) -> RunResult:
        """What ``folder`` says; read only where a file of it has changed, or who holds it."""
        signature, running = _signature(folder), is_held(folder / LOCK, held)
        known = self._known.get(folder)
        if known is None or known[:2] != (signature, running):
            log = self._logs.setdefault(folder, MetricsLog(folder / METRICS))
            known = (signature, running, read_run(folder, held, log))
            self._known[folder] = known
        return known[2]

    def _is_inside(self, folder: Path) -> bool:
        return all((folder / name).resolve().is_relative_to(self.root) for name in (*_FILES, LOCK))


def _signature(folder: Path) -> _Signature:
    found: list[tuple[int, int, int] | None] = []
    for name in _FILES:
        try:
            facts = (folder / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((facts.st_ino, facts.st_mtime_ns, facts.st_size))
    return tuple(found)


def _wrote_ns(folder: Path) -> int:
    try:
        return (folder / METRICS).stat().st_mtime_ns
    except OSError:
        return 0
