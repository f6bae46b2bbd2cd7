"""The lock on a run folder, so that it has one writer.

Two runs in one folder would mix their logs and delete each other's checkpoints. So rank 0 holds an ``flock`` on the
file ``run.lock``, which the kernel releases when the process ends, however it ends. Some network file systems grant the
same lock twice. So the file also has a number of attempts: a run that finds another number than its own stops writing.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from zeroshard.errors import UserError
from zeroshard.regular_files import json_of, open_regular, read_text

LOCK = "run.lock"
_MOST_BYTES = 4096  # a larger file is not a lock file of ours


class RunLock:
    """Locks ``folder`` from construction until `close`.

    Attributes:
        attempt: how often the folder has been locked, this time included.

    Raises:
        UserError: another run has locked the folder.
        OSError: the folder is missing or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._is_new = not self._path.exists()
        # No link is followed: what it leads to would be overwritten.
        self._descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT, follow=False)
        try:
            self._hold()
        except BaseException:
            self.close()
            raise

    def _hold(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(self._path)
            what = f"{self._path.parent} is in use by process {holder.get('pid')} on {holder.get('host')}"
            raise UserError("out", what, "end that run first, or choose another --out") from None
        before = _read(self._path).get("attempt")
        self.attempt = before + 1 if isinstance(before, int) and before >= 0 else 1
        words = json.dumps({"attempt": self.attempt, "pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, words.encode() + b"\n", 0)
        os.fsync(self._descriptor)

    def require(self) -> None:
        """Check that this run still owns the folder.

        Raises:
            FileNotFoundError: the lock file is gone, which means that the folder was removed.
            OSError: another run has locked the folder since.
        """
        try:
            here = os.stat(self._path)
        except FileNotFoundError:
            raise FileNotFoundError(f"{self._path.parent} was removed while the run was writing there") from None
        held = None if self._descriptor < 0 else os.fstat(self._descriptor)
        found = _read(self._path)
        if held is None or not os.path.samestat(here, held) or found.get("attempt") != self.attempt:
            raise OSError(
                f"{self._path.parent} now belongs to process {found.get('pid')} on {found.get('host')}, "
                f"attempt {found.get('attempt')}: this run, attempt {self.attempt}, writes there no more"
            )

    def discard(self) -> None:
        """Release the lock of a run that never began, and remove the file if this run made it."""
        if self._is_new and self._descriptor >= 0:
            self._path.unlink(missing_ok=True)  # before it is released: then another run may have it
        self.close()

    def close(self) -> None:
        """Release the lock; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def was_locked(folder: Path) -> bool:
    """Whether a run of ours has had its lock in ``folder``, running or ended."""
    return isinstance(_read(folder / LOCK).get("attempt"), int)


def _read(path: Path) -> dict[str, Any]:
    """Read the facts that the holder of the lock wrote; empty if they are missing or incomplete."""
    try:
        found = json_of(read_text(path, _MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
