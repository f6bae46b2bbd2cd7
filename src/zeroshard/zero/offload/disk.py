"""Optimizer states and master weights in a file: read and written a unit at a time, while another unit is updated.

Each rank has one file. A unit's tensors lie in it one after another, in a region that begins at a multiple of 4,096
bytes and never moves; in memory there are three slots of the largest region:

    file    | unit 0 | unit 1 | unit 2 | unit 3 | ...
    slots         writing back  updated   read ahead

`DiskStates.read` returns a unit's tensors and begins to read the next unit, `DiskStates.write` begins to write a unit
back; a few threads copy pieces of it at a time (`os.preadv` and `os.pwritev` let other threads run). Where the file
system allows it, the page cache is left out (``O_DIRECT``): each byte is used once a step, and cached pages would push
out what is used more often, or count against the memory of a container.

The file is scratch space of one run. What outlives a run is its checkpoints: a process that is killed between two units
leaves a file with states of two steps, so the next run takes such a file over and never reads what was in it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.errors import UserError
from zeroshard.regular_files import open_regular
from zeroshard.slab import room

BLOCK_BYTES = 4096  # what O_DIRECT wants of offsets, lengths and addresses, on file systems of today
PIECE_BYTES = 8 << 20  # what one thread copies at a time
NUM_THREADS = 4
NUM_SLOTS = 3  # one is updated, one is read ahead, one is written back

Spec = Sequence[tuple[int, torch.dtype]]
"""Number of elements and dtype of each of a unit's tensors."""


def region_bytes(spec: Spec) -> int:
    """The bytes of the file that a unit's tensors take."""
    num_bytes = sum(room(numel * dtype.itemsize) for numel, dtype in spec)
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def rank_file(folder: Path, rank: int) -> Path:
    """The path of a rank's file in the folder that a run was given."""
    return folder / f"rank-{rank:05d}.states"


class _Region(NamedTuple):
    """Where a unit's tensors are in the file."""

    start: int
    num_bytes: int
    spec: Spec


@dataclass(eq=False)
class _Slot:
    """Memory for one unit's region.

    Attributes:
        is_dirty: whether the file may lack what is here: a write is under way, or has failed.
    """

    memory: mmap.mmap
    unit: Hashable | None = None
    is_dirty: bool = False
    reading: list[Future[None]] = field(default_factory=list)
    writing: list[Future[None]] = field(default_factory=list)


class DiskStates:
    """Tensors of units in the file ``path``, which this object alone uses until `close`; one thread at a time calls it.

    Args:
        path: the file, made if it is missing. What a run that ended has left there is overwritten.
        num_bytes: the size that the file will have, if it is known: then a disk without the room says so at once.
        num_threads: threads that copy.
        keep: whether the file stays after `close`.

    Raises:
        UserError: another run uses the file, or the disk does not have the room.
        OSError: the file cannot be made.

    Attributes:
        num_bytes: size of the file.
        is_direct: whether the page cache is left out.
        bytes_read, bytes_written: since construction.
    """

    def __init__(self, path: Path, num_bytes: int = 0, *, num_threads: int = NUM_THREADS, keep: bool = False) -> None:
        self.path = path
        self._regions: dict[Hashable, _Region] = {}
        self._next: dict[Hashable, Hashable] = {}  # the unit that is read after each
        self._slots: list[_Slot] = []  # the one used longest ago first
        self.num_bytes = self.bytes_read = self.bytes_written = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self.is_direct = _open(path)
        try:
            _lock(self._file, path)
            os.ftruncate(self._file, 0)
            _reserve(self._file, path, 0, num_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="offload-disk")
        self._end = weakref.finalize(self, _end, self._threads, self._file, None if keep else path)

    @property
    def slot_bytes(self) -> int:
        """Bytes of host memory that the slots take."""
        return sum(len(slot.memory) for slot in self._slots)

    def __contains__(self, unit: object) -> bool:
        return unit in self._regions

    def put(self, unit: Hashable, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Begin to write a unit's tensors, 1-D and on the CPU, and return them as views of a slot, as `read` does.

        The first time, the unit gets its region. `read` reads units in the order in which they were put first.

        Raises:
            UserError: the disk does not have the room.
            OSError: an earlier write failed.
        """
        spec = tuple((tensor.numel(), tensor.dtype) for tensor in tensors)
        if unit not in self._regions:
            region = _Region(self.num_bytes, region_bytes(spec), spec)
            _reserve(self._file, self.path, region.start, region.num_bytes)
            first, last = next(iter(self._regions), unit), next(reversed(self._regions), unit)
            self._next[last], self._next[unit] = unit, first
            self._regions[unit] = region
            self.num_bytes += region.num_bytes
        assert self._regions[unit].spec == spec, f"{unit}: other tensors than before"
        slot = self._slot_of(unit) or self._free_slot(unit)
        self._finish_reading(slot)
        self._finish_writing(slot)
        places = self._views(slot)
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        self.write(unit)
        return places

    def read(self, unit: Hashable) -> list[Tensor]:
        """Return a unit's tensors, ``[numel]`` each, and begin to read the next unit.

        They are views of a slot. They may be changed, and are valid until the next unit but one is read; changes that
        are not written back by `write` are lost.

        Raises:
            OSError: the file cannot be read or, earlier, be written.
        """
        slot = self._slot_of(unit) or self._begin_reading(unit)
        self._finish_reading(slot)
        self._finish_writing(slot)  # else a later change would be written in part
        following = self._next[unit]
        if self._slot_of(following) is None:
            self._begin_reading(following)
        return self._views(slot)

    def write(self, unit: Hashable) -> None:
        """Begin to write back the tensors that `read` returned; from now on they may be read, but not changed."""
        slot = self._slot_of(unit)
        assert slot is not None, f"{unit}: it was not read"
        slot.is_dirty = True
        slot.writing = self._begin(slot, _write)
        self.bytes_written += self._regions[unit].num_bytes

    def settle(self) -> None:
        """Wait for all writes.

        Raises:
            OSError: one of them failed. Its tensors are still in their slot, and are written again by the next call.
        """
        for slot in self._slots:
            self._finish_writing(slot)

    def close(self) -> None:
        """Wait for reads and writes, then remove the file unless it is kept, and unlock it. May be called twice."""
        self._end()

    def _slot_of(self, unit: Hashable) -> _Slot | None:
        """The slot that has a unit, which is then the one used last."""
        slot = next((slot for slot in self._slots if slot.unit == unit), None)
        if slot is not None:
            self._slots.remove(slot)
            self._slots.append(slot)
        return slot

    def _free_slot(self, unit: Hashable) -> _Slot:
        """Give a unit a slot: a new one, or that used longest ago once nothing of it is under way."""
        if len(self._slots) < NUM_SLOTS:
            slot = _Slot(_pages(0))
        else:
            slot = self._slots[0]
            self._finish_writing(slot)  # raises before the slot is taken: what the file lacks stays there
            wait(slot.reading)  # a unit that was read ahead, and then another one was asked for
            slot.reading.clear()
            del self._slots[0]
        if len(slot.memory) < (needed := self._regions[unit].num_bytes):
            slot.memory = _pages(needed)
        slot.unit = unit
        self._slots.append(slot)
        return slot

    def _begin_reading(self, unit: Hashable) -> _Slot:
        slot = self._free_slot(unit)
        slot.reading = self._begin(slot, _read)
        self.bytes_read += self._regions[unit].num_bytes
        return slot

    def _begin(self, slot: _Slot, copy: Callable[[int, Path, memoryview, int], None]) -> list[Future[None]]:
        region, view = self._regions[slot.unit], memoryview(slot.memory)
        cuts = range(0, region.num_bytes, PIECE_BYTES)
        parts = [(view[at : min(at + PIECE_BYTES, region.num_bytes)], region.start + at) for at in cuts]
        return [self._threads.submit(copy, self._file, self.path, part, at) for part, at in parts]

    def _finish_reading(self, slot: _Slot) -> None:
        pieces, slot.reading = slot.reading, []
        wait(pieces)
        try:
            for piece in pieces:
                piece.result()
        except OSError:
            slot.unit = None  # what is there is not the unit
            raise

    def _finish_writing(self, slot: _Slot) -> None:
        if not slot.is_dirty:
            return
        pieces, slot.writing = slot.writing or self._begin(slot, _write), []  # none: the last attempt failed
        wait(pieces)
        for piece in pieces:
            piece.result()
        slot.is_dirty = False

    def _views(self, slot: _Slot) -> list[Tensor]:
        found, at = [], 0
        for numel, dtype in self._regions[slot.unit].spec:
            end = at + numel * dtype.itemsize
            found.append(torch.frombuffer(slot.memory, dtype=torch.uint8)[at:end].view(dtype))
            at += room(end - at)
        return found


def _pages(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, max(num_bytes, BLOCK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _open(path: Path) -> tuple[int, bool]:
    """Open the file, past the page cache if the file system can do that; returns whether it can."""
    flags, direct = os.O_RDWR | os.O_CREAT, getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return open_regular(path, flags | direct, 0o600, follow=False), True
        except OSError as error:
            if error.errno != errno.EINVAL or path.is_symlink():
                raise
    return open_regular(path, flags, 0o600, follow=False), False


def _lock(file: int, path: Path) -> None:
    """Lock the file until it is closed, by whatever end of the process.

    Raises:
        UserError: another run has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(file)):
            return
    except (BlockingIOError, FileNotFoundError):  # the second: its owner has just removed it
        pass
    todo = "end that run first, or choose another folder"
    raise UserError("offload.path", f"{path} is in use by another run", todo)


def _reserve(file: int, path: Path, start: int, num_bytes: int) -> None:
    """Have the file system set ``num_bytes`` from ``start`` aside, so that no write finds the disk full later.

    Raises:
        UserError: the disk does not have the room.
    """
    if not num_bytes:
        return
    try:
        os.posix_fallocate(file, start, num_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = os.fstatvfs(file)
            what = f"{path} needs {num_bytes:,} bytes more, and {free.f_bavail * free.f_frsize:,} are free there"
            raise UserError("offload.path", what, "free space, or name a folder on another disk") from None
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise _named(error, path) from None
        os.ftruncate(file, max(start + num_bytes, os.fstat(file).st_size))  # it cannot: a write will find a full disk


def _read(file: int, path: Path, into: memoryview, at: int) -> None:
    while into:
        try:
            got = os.preadv(file, [into], at)
        except OSError as error:
            raise _named(error, path) from None
        if not got:
            short = f"it has {os.fstat(file).st_size:,} bytes, too few: another program has changed it"
            raise OSError(errno.EIO, short, os.fspath(path))
        into, at = into[got:], at + got


def _write(file: int, path: Path, data: memoryview, at: int) -> None:
    while data:
        try:
            done = os.pwritev(file, [data], at)
        except OSError as error:
            raise _named(error, path) from None
        data, at = data[done:], at + done


def _named(error: OSError, path: Path) -> OSError:
    """The same error with the file's name, which errors of a descriptor lack."""
    return OSError(error.errno, error.strerror, os.fspath(path))


def _end(threads: ThreadPoolExecutor, file: int, remove: Path | None) -> None:
    threads.shutdown(wait=True)
    if remove is not None:
        remove.unlink(missing_ok=True)  # before it is unlocked: then another run may have it
    os.close(file)
