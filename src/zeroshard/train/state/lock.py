"""A run folder has one writer.

Two runs in one folder would mix their logs and delete each other's checkpoints. Rank 0 holds a lock on the file
``run.lock``, which the kernel takes back when the process ends, however it ends. Some network file systems grant one
lock twice; so the file also counts attempts, and who finds a later attempt than its own there writes no more.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from zeroshard.errors import UserError
from zeroshard.regular_files import json_of, open_regular, read_text

LOCK = "run.lock"
_MOST_BYTES = 4096  # that a holder writes, and more


class RunLock:
    """Holds ``folder`` from construction to `close`.

    Attributes:
        attempt: how often the folder has been held, this time included.

    Raises:
        UserError: another run holds it.
        OSError: the folder is not there or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor = _open(self._path)
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
        """Raise OSError where the folder is no longer this run's: taken over by a later attempt, or removed.

        Raises:
            FileNotFoundError: the lock file is gone, and the folder with it.
            OSError: a later attempt holds the folder.
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

    def renew(self) -> bool:
        """Make the folder and its lock again where both were removed; whether that was so.

        Raises:
            OSError: the folder cannot be made, or another run has taken the place.
        """
        try:
            self.require()
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.close()
            self._descriptor = _open(self._path)
            try:
                self._hold()
            except UserError as error:
                raise OSError(str(error)) from None
            return True
        return False

    def close(self) -> None:
        """Let the folder go; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open(path: Path) -> int:
    """The lock's file, made where it is not there; nothing of it is changed.

    Raises:
        OSError: it cannot be opened, or is something else under that name: a link to another file would have that one
            overwritten.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, follow=False)
    facts = os.fstat(descriptor)
    if facts.st_nlink > 1 or facts.st_size > _MOST_BYTES:
        os.close(descriptor)
        why = "it has another name, too" if facts.st_nlink > 1 else f"it has {facts.st_size:,} bytes"
        raise OSError(errno.EINVAL, f"{why}, and no lock of ours has", str(path))
    return descriptor


def _read(path: Path) -> dict[str, Any]:
    """What the holder wrote; nothing where that is cut off."""
    try:
        found = json_of(read_text(path, _MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
