"""Temporary folders that are removed even if their owner is killed: the next start removes those that nobody uses.

A folder is made under a hidden name, a file in it is locked, and only then is it renamed to its final name. The kernel
drops the lock when the owner ends, however it ends. So a folder with a final name whose lock is free, or gone, has no
owner.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroshard.regular_files import open_regular

_OWNER = "owner.lock"
_BEGIN_S = 60.0  # a hidden folder of this age is not about to be locked any more


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
            _remove(each)
        if lock >= 0:
            os.close(lock)


def remove_unowned(place: Path, prefix: str) -> list[Path]:
    """Remove this user's folders ``prefix*`` in ``place`` whose owners have died; return those."""
    removed = []
    for path in sorted((*place.glob(f"{prefix}*"), *place.glob(f".{prefix}*"))):
        try:
            facts = path.lstat()
            just_begun = path.name.startswith(".") and time.time() - facts.st_mtime < _BEGIN_S
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or just_begun:
                continue
            lock = open_regular(path / _OWNER, os.O_RDWR, follow=False)
        except OSError:  # not a folder of ours, or just removed, or its owner was killed before or after it had a lock
            with suppress(OSError):
                path.rmdir()  # only if it is empty
                removed.append(path)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
            removed.append(path)
        except BlockingIOError:  # in use
            continue
        finally:
            os.close(lock)
    return removed


def _remove(folder: Path) -> None:
    """Delete a folder, its lock last: if this process is killed meanwhile, the next start finds that nobody owns it."""
    for path in folder.glob("*"):
        if path.name != _OWNER:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
