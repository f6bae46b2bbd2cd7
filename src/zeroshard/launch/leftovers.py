"""Temporary folders whose owner may be killed: the next start removes what it left, and nothing that is in use.

A folder is made under a hidden name, a file in it is locked, and only then it takes its name. The kernel drops the lock
when its owner ends, however it ends. So a folder of that name whose lock can be had belongs to nobody.
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
    """A new temporary folder, removed on the way out; those of the same ``prefix`` whose owners have died go first.

    Args:
        prefix: of its name, of a launcher's alone.
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
    """Remove this user's folders ``prefix*`` in ``place`` whose owners have died; which they were."""
    removed = []
    for path in sorted(place.glob(f"{prefix}*")):
        try:
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            lock = open_regular(path / _OWNER, os.O_RDWR, follow=False)
        except OSError:  # no folder of ours, or just gone
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
