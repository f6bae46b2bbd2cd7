"""Publish a folder under its name atomically, even if several processes make the same one.

It is written under a hidden name beside the final one, flushed to disk and renamed. A rename never replaces a folder
that is not empty, so of several writers the first wins and the others learn that they lost.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from zeroshard.errors import UserError


@contextmanager
def draft_of(out: Path) -> Generator[Path, None, None]:
    """Yield a new hidden folder beside ``out``; delete it afterwards unless it was published.

    Raises:
        UserError: it cannot be made: no permission, no space, a parent that is a file.
    """
    draft = out.parent / f".{out.name}-{uuid.uuid4().hex[:12]}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
    except OSError as error:
        raise UserError(
            "data.dir", f"cannot write {out}: {error.strerror}", "name a folder that can be written, by --data.dir"
        ) from None
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish(draft: Path, out: Path, complete_mark: str) -> bool:
    """Flush a draft to disk and rename it to ``out``.

    Returns:
        True; False if another writer was first: ``out`` already contains a file ``complete_mark``.

    Raises:
        OSError: the disk failed, or something else is in the way.
    """
    for folder, _, names in os.walk(draft, topdown=False):
        for name in names:
            _flush(Path(folder, name))
        _flush(Path(folder))
    try:
        draft.rename(out)
    except OSError:
        if (out / complete_mark).exists():
            return False
        raise
    _flush(out.parent)
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
