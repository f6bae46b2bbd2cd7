"""Temporary folders that are removed even if their owner is killed: the next start removes those that nobody uses.

The owner holds a lock on the folder itself, which the kernel drops when the owner ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def owned_folder(prefix: str) -> Generator[str]:
    """Make a temporary folder and remove it at the end of the context.

    Before that, remove this user's folders of the same ``prefix`` whose owners have died; no other kind of folder may
    have a name that begins with it.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if (left := _locked(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(left)
    folder = tempfile.mkdtemp(prefix=prefix)
    while (lock := _locked(folder)) is None:  # another start has taken it for left and is removing it
        folder = tempfile.mkdtemp(prefix=prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: str | Path) -> int | None:
    """Lock a folder of this user's; return its descriptor, or None if it is in use, gone, or no such folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.isdir(folder):
                return descriptor
    except BlockingIOError:
        pass  # in use
    os.close(descriptor)
    return None
