"""The files of ranks in the folder that a run was given for its states.

A process that is killed between two units leaves a file with states of two steps, which nobody has locked. The next run
in the folder removes such files, of whichever rank, and says so.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

from zeroshard.host import host_memory
from zeroshard.host.errors import UserError, warn
from zeroshard.host.regular_files import open_regular
from zeroshard.zero.offload.disk import DiskStates, lock

NUM_TRIES, TRY_AGAIN_S = 10, 0.05  # while a file is locked
RANK_FILES = "rank-*.states"


def rank_file(folder: Path, rank: int) -> Path:
    """The path of a rank's file in the folder that a run was given; all of them match `RANK_FILES`."""
    return folder / f"rank-{rank:05d}.states"


def _made(path: Path) -> DiskStates:
    """Make the file; an engine of this process that nobody refers to any more may have it for the end of its update.

    A run that ends may also remove the folder, and another rank look whether the new file is one of a killed run.
    """
    for _ in range(NUM_TRIES):
        try:
            return DiskStates(path)
        except (UserError, FileNotFoundError):
            gc.collect()
            time.sleep(TRY_AGAIN_S)
    return DiskStates(path)


def left_behind(folder: Path) -> list[Path]:
    """The files of ranks in a folder that no run uses: a run was killed."""
    found = []
    for path in sorted(folder.glob(RANK_FILES)):
        try:
            file = open_regular(path, os.O_RDWR, 0o600, follow=False)
        except OSError:  # it is gone, or none of ours
            continue
        try:
            lock(file, path)
            found.append(path)
        except UserError:  # a run's
            pass
        finally:
            os.close(file)
    return found


def _remove_left_behind(folder: Path) -> None:
    """Remove the files of ranks that no run uses, and say so."""
    num_files = num_bytes = 0
    for path in left_behind(folder):
        try:
            num_bytes += path.stat().st_size
            DiskStates(path).close()  # locks it again: a rank may have made it meanwhile
            num_files += 1
        except (OSError, UserError):
            continue
    if num_bytes:
        files = "the file" if num_files == 1 else f"{num_files} files"
        what = f"{files} of a run that was killed ({num_bytes:,} bytes): a run resumes from its checkpoint"
        warn(f"offload.path: {folder} had {what}; removed")


def file_of_rank(folder: Path, rank: int) -> DiskStates:
    """Make and lock a rank's file.

    Raises:
        UserError: the folder cannot be made or written, or another run uses the file.
    """
    try:
        _remove_left_behind(folder)
        file = _made(rank_file(folder, rank))
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror or error}"
        raise UserError("offload.path", what, "name a folder on a local disk that can be written") from None
    if host_memory.keeps_files_of(folder):
        warn(
            f"offload.path: {folder} is in memory (tmpfs), so state there takes as much of it as without --offload disk"
        )
    return file
