"""Finds and reads the runs below a folder; a run is read again only if one of its files has changed.

For the list of runs only the ends of each log are read; for runs whose curves are shown, the whole log. If a log was
read before, only the appended lines are read. If many runs are new, they are read over several calls, the newest first,
so that a page has something to show at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.lab.dashboard.changes import mark
from zeroshard.lab.log_ends import LogEnds
from zeroshard.lab.metrics_log import MetricsLog
from zeroshard.lab.run_folders import CONFIG, METRICS, SUMMARY, RunResult, find_runs, is_held, locks_held, read_run
from zeroshard.train.state.lock import LOCK

_FILES = (CONFIG, METRICS, SUMMARY)
MOST_WHOLE = 32  # most complete logs kept in memory: those of the runs that were requested last
_Signature = tuple[tuple[int, int, int] | None, ...]
_Locks = frozenset[tuple[int, int, int]]


@dataclass(frozen=True, eq=False)
class Seen:
    """A run as of its last reading. Compared by identity, so that it can be a key of a cache.

    Attributes:
        run: the contents of its folder.
        token: a text that changes whenever the run's files or its lock change.
    """

    run: RunResult
    token: str


class Readings:
    """A cache of runs by folder; each has its log, so that the next reading continues where the last one ended."""

    def __init__(self, log_of: Callable[[Path], MetricsLog]) -> None:
        self._log_of = log_of
        self._known: dict[Path, tuple[Seen, MetricsLog]] = {}

    def __contains__(self, folder: Path) -> bool:
        return folder in self._known

    def read(self, folder: Path, held: _Locks) -> Seen:
        """Return the run in ``folder``; it is read only if one of its files has changed, or whether it is locked."""
        token = _token(_signature(folder), is_held(folder / LOCK, held))
        seen, log = self._known.pop(folder, None) or (None, self._log_of(folder / METRICS))
        if seen is None or seen.token != token:
            seen = Seen(read_run(folder, held, log), token)
        self._known[folder] = (seen, log)  # moved to the end: it was requested last
        return seen

    def keep(self, folders: set[Path]) -> None:
        """Forget all runs but those in ``folders``."""
        self._known = {folder: found for folder, found in self._known.items() if folder in folders}

    def keep_last(self, count: int) -> None:
        """Forget all runs but the ``count`` that were requested last."""
        for folder in list(self._known)[:-count]:
            del self._known[folder]


class Watch:
    """The runs below ``root``. Symbolic links to files outside of it are not followed. Thread-safe."""

    def __init__(self, root: str | Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.num_unread = 0  # runs that the last call of `runs` did not read, because its time was over
        self.root = Path(root).resolve()
        self._listed, self._whole = Readings(LogEnds), Readings(MetricsLog)
        self._lock = threading.Lock()

    def runs(self, budget_s: float | None = None) -> dict[str, Seen]:
        """The runs by their path below the root, in order of path; each has only its last steps (`LogEnds`).

        Args:
            budget_s: seconds after which this call reads no further new run; it reads at least one. None: no limit.
        """
        with self._lock:
            held = locks_held()
            ends = None if budget_s is None else self._clock() + budget_s
            folders = [folder for folder in find_runs(self.root) if self._is_inside(folder)]
            new = sorted((folder for folder in folders if folder not in self._listed), key=_wrote_ns, reverse=True)
            num_read = 0
            for folder in new:
                if num_read and ends is not None and self._clock() >= ends:
                    break
                self._listed.read(folder, held)
                num_read += 1
            unread = set(new[num_read:])
            self.num_unread = len(unread)
            self._listed.keep(set(folders) - unread)
            return {self._name(folder): self._listed.read(folder, held) for folder in folders if folder not in unread}

    def whole(self, chosen: Mapping[str, Seen]) -> dict[str, Seen]:
        """The same runs as ``chosen`` (some of the result of `runs`), with all of their steps."""
        with self._lock:
            held = locks_held()
            found = {name: self._whole.read(seen.run.folder, held) for name, seen in chosen.items()}
            self._whole.keep_last(max(MOST_WHOLE, len(found)))
            return found

    def _name(self, folder: Path) -> str:
        name = folder.relative_to(self.root).as_posix()
        return self.root.name if name == "." else name

    def _is_inside(self, folder: Path) -> bool:
        return all((folder / name).resolve().is_relative_to(self.root) for name in (*_FILES, LOCK))


def _token(signature: _Signature, running: bool) -> str:
    return mark(repr((signature, running)))


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
