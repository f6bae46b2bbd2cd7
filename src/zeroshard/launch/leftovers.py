"""Temporary folders that are removed even if their owner is killed: the next start removes those that nobody uses.

A folder is made under a hidden name, a file in it is locked, and only then is it renamed to its final name. The kernel
drops the lock when the owner ends, however it ends. So a folder with a final name whose lock is free has no owner.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from zeroshard.regular_files import open_regular

_OWNER = "owner.lock"


@contextmanager
def owned_folder(prefix: str) -> Generator[str]:
    """Make a temporary folder and remove it at the end of the context.

    Before that, remove folders of the same ``prefix`` whose owners have died.

    Args:
        prefix: beginning of the folder's name; no other kind of folder may use it.
    """
    place = Path(tempfile.gettempdir())
    remove_unowned(place, prefix)
    hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=place))
    path = hidden.with_name(hidden.name[1:])
    lock = -1
    try:
        lock = open_regular(hidden / _OWNER, os.O_RDWR | os.O_CREAT, 0o600, follow=False)
        fcntl.flock(lock, fcntl.LOCK_EX)
        hidden.rename(path)
        yield str(path)
    finally:
        for each in (hidden, path):
            shutil.rmtree(each, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def remove_unowned(place: Path, prefix: str) -> list[Path]:
    """Remove this user's folders ``prefix*`` in ``place`` whose owners have died; return those."""
    removed = []
    for path in sorted(place.glob(f"{prefix}*")):
        try:
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            lock = open_regular(path / _OWNER, os.O_RDWR, follow=False)
        except OSError:  # not a folder of ours, or just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:  # in use
            continue
        finally:
            os.close(lock)
    return removed
