"""The runs below a folder. A run is read again when a file of it has changed, and else remembered.

Of a log only what was appended is read.
"""

from __future__ import annotations

import threading
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

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()
        self._known: dict[Path, tuple[_Signature, bool, RunResult]] = {}
        self._logs: dict[Path, MetricsLog] = {}
        self._lock = threading.Lock()

    def runs(self) -> dict[str, RunResult]:
        """Every run by its path below the root, in order of path."""
        with self._lock:
            held = locks_held()
            found: dict[str, RunResult] = {}
            for folder in find_runs(self.root):
                if not self._is_inside(folder):
                    continue
                signature, running = _signature(folder), is_held(folder / LOCK, held)
                known = self._known.get(folder)
                if known is None or known[:2] != (signature, running):
                    log = self._logs.setdefault(folder, MetricsLog(folder / METRICS))
                    known = (signature, running, read_run(folder, held, log))
                    self._known[folder] = known
                name = folder.relative_to(self.root).as_posix()
                found[self.root.name if name == "." else name] = known[2]
            self._known = {run.folder: self._known[run.folder] for run in found.values()}
            self._logs = {run.folder: self._logs[run.folder] for run in found.values()}
            return found

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
