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

from zeroshard.host.errors import UserError, warn
from zeroshard.host.regular_files import is_same, json_of, open_inside, read_text

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
        # The open folder tells whether another one has its name later: an inode that is in use has no second life.
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._descriptor = -1
        try:
            self._descriptor = open_inside(folder, LOCK, os.O_RDWR | os.O_CREAT)
            self._hold()
            before = _read(self._path).get("attempt")
            self.attempt = before + 1 if isinstance(before, int) and before >= 0 else 1
            self._sign()
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

    def _sign(self) -> None:
        facts = {"attempt": self.attempt, "pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(facts).encode() + b"\n", 0)
        os.fsync(self._descriptor)

    def require(self) -> None:
        """Check that this run still owns the folder; make and lock its file again if somebody has removed that alone.

        Raises:
            FileNotFoundError: the folder has another name now, or is gone.
            OSError: another run has locked the folder since, or the file cannot be written.
        """
        folder = self._path.parent
        if self._descriptor >= 0 and not os.path.lexists(self._path):
            if not is_same(folder, self._folder):
                raise FileNotFoundError(f"{folder} was removed or renamed while the run was writing there")
            self._make_again()
        found = _read(self._path)
        attempt = found.get("attempt")
        if not is_same(self._path, self._descriptor) or (isinstance(attempt, int) and attempt != self.attempt):
            raise OSError(
                f"{folder} now belongs to process {found.get('pid')} on {found.get('host')}, "
                f"attempt {attempt}: this run, attempt {self.attempt}, writes there no more"
            )

    def _make_again(self) -> None:
        made = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # if another run makes it first, it has the folder
        descriptor = os.open(LOCK, made, 0o666, dir_fd=self._folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._sign()
        warn(f"{self._path} was removed while the run was writing there; it is made and locked again")

    def discard(self) -> None:
        """Release the lock of a run that never began, and remove the file if this run made it."""
        if self._is_new and self._descriptor >= 0:
            self._path.unlink(missing_ok=True)  # before it is released: then another run may have it
        self.close()

    def close(self) -> None:
        """Release the lock; may be called twice."""
        for descriptor in {self._descriptor, self._folder} - {-1}:
            os.close(descriptor)
        self._descriptor = self._folder = -1


def was_locked(folder: Path) -> bool:
    """Whether a run of ours has had its lock in ``folder``, running or ended."""
    return isinstance(_read(folder / LOCK).get("attempt"), int)


def _read(path: Path) -> dict[str, Any]:
    """Read the facts that the holder of the lock wrote; empty if they are missing or incomplete."""
    try:
        found = json_of(read_text(path, _MOST_BYTES, follow=False))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
