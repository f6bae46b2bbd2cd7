"""Optimizer states and master weights in a file: read and written a unit at a time, while another unit is updated.

Each rank has one file. A unit's tensors lie in it in one or more extents (its master weights, its reduced gradients,
and the states that its first step made), which begin at a multiple of `BLOCK_BYTES` and never move; in memory there are
three slots, each for all extents of a unit:

    file    | unit 0 | unit 1 | unit 2 | unit 3 | ...
    slots         writing back  updated   read ahead

`DiskStates.read` returns a unit's tensors in a slot and begins to read the next unit, `DiskStates.write` begins to
write a unit back; a few threads copy pieces of it at a time (`os.preadv` and `os.pwritev` let other threads run). Where
the file system allows it, the page cache is left out (``O_DIRECT``): each byte is used once a step, and cached pages
would push out what is used more often, or count against the memory of a container.

[Note: Views of the file]
    Everybody else sees the tensors that `DiskStates.add` returns: views of a shared mapping of the file, from which the
    kernel reads the pages that are asked for. Mapping and O_DIRECT are coherent on Linux: a direct write drops the
    pages that are mapped, a direct read first writes back those that were changed. Slots are copies, so they are given
    up at the end of a walk (`settle`), and a view is read only once the unit's write is over (`wait`); until then the
    slot may be read (`in_memory`). Pages that were touched between two walks are dropped when the next one begins.

The file is scratch space of one run: what outlives a run is its checkpoints. A folder that was made for the files goes
with the last of them: `MADE` is in it.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.host.errors import UserError
from zeroshard.host.finalizers import Finalizer, settle
from zeroshard.host.regular_files import open_regular
from zeroshard.host.slab import anonymous_pages, room

# what O_DIRECT wants of offsets, lengths and addresses on file systems of today, and a mapping of its offset
BLOCK_BYTES = max(4096, mmap.ALLOCATIONGRANULARITY)
PIECE_BYTES = 8 << 20  # what one thread copies at a time
NUM_THREADS = 4
MADE = ".made-for-states"
NUM_SLOTS = 3  # one is updated, one is read ahead, one is written back

Spec = Sequence[tuple[int, torch.dtype]]
"""Number of elements and dtype of each of a unit's tensors."""


def extent_bytes(spec: Spec) -> int:
    """The bytes of the file that tensors take which are added to a unit at a time."""
    num_bytes = sum(room(numel * dtype.itemsize) for numel, dtype in spec)
    return max(-(-num_bytes // BLOCK_BYTES), 1) * BLOCK_BYTES


class _Extent(NamedTuple):
    """Where some of a unit's tensors are in the file, and the mapping that shows them as long as it is used."""

    start: int
    num_bytes: int
    spec: Spec
    pages: weakref.ref[mmap.mmap]
    is_input: bool  # read with the unit, and not written back with it


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
        self.path = path.absolute()  # the folder that a process works in may change before its end
        self._units: weakref.WeakKeyDictionary[Any, list[_Extent]] = weakref.WeakKeyDictionary()
        self._next: dict[Hashable, Hashable] = {}  # the unit that is read after each
        self._slots: list[_Slot] = []  # the one used longest ago first
        self._writing: dict[Hashable, list[Future[None]]] = {}  # of slots that have what the file will have
        self._keeps_slots = threading.Lock()  # held by who reads in a slot, or gives one to another unit
        self._arriving: weakref.WeakKeyDictionary[Any, list[Future[None]]] = weakref.WeakKeyDictionary()  # inputs
        self._free: list[tuple[int, int]] = []  # `(start, bytes)` of extents that nothing shows any more
        self.num_bytes = self.bytes_read = self.bytes_written = 0
        settle()  # a dropped one may have the file yet
        _make_folder(path.parent)
        self._file, self.is_direct = _open(path)
        try:
            lock(self._file, path)
            os.ftruncate(self._file, 0)
            _reserve(self._file, path, 0, num_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="offload-disk")
        self._end = Finalizer(self, _end, self._threads, self._file, None if keep else self.path)

    @property
    def is_idle(self) -> bool:
        """Whether no walk is under way: no slot has a unit."""
        return all(slot.unit is None for slot in self._slots)

    @property
    def slots(self) -> list[mmap.mmap]:
        """The host memory of the slots."""
        return [slot.memory for slot in self._slots]

    @property
    def slot_bytes(self) -> int:
        """Bytes of host memory that the slots take."""
        return sum(map(len, self.slots))

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    def add(self, unit: Hashable, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Give further tensors of a unit, 1-D and on the CPU, a place in the file: [Note: Views of the file].

        Returns them there, with their values. ``unit`` is an object that can be referenced weakly; when it is gone,
        and nobody has a view of its tensors, others may have their place.

        Raises:
            UserError: the disk does not have the room.
            OSError: an earlier write failed.
        """
        extent, pages = self._add(unit, tuple((tensor.numel(), tensor.dtype) for tensor in tensors), is_input=False)
        places = list(_tensors(pages, extent.spec, 0))
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        pages.flush()
        self._drop_pages(extent)
        return places

    def add_input(self, unit: Hashable, numel: int, dtype: torch.dtype) -> Tensor:
        """Give a unit one tensor, ``[numel]``, that `read` returns too, and that `write_input` alone writes.

        Returns it there, and raises, as `add`.
        """
        _, pages = self._add(unit, ((numel, dtype),), is_input=True)
        return torch.frombuffer(pages, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def write_input(self, unit: Hashable, values: Tensor, after: Callable[[], None] | None) -> list[Future[None]]:
        """Begin to write a unit's input; any thread may call it, while no walk is about to read the unit.

        Args:
            unit: its last tensor of `add_input` is written.
            values: ``[extent_bytes]``, uint8, in pages of their own; they may change once what is returned is over.
            after: waits until they are there; None: they are.
        """
        extent = next(extent for extent in reversed(self._units[unit]) if extent.is_input)
        cuts, content = range(0, extent.num_bytes, PIECE_BYTES), memoryview(values.numpy())
        parts = [(content[at : min(at + PIECE_BYTES, extent.num_bytes)], extent.start + at) for at in cuts]
        pieces = [self._threads.submit(_write_after, after, self._file, self.path, *part) for part in parts]
        self._arriving[unit] = pieces
        self.bytes_written += extent.num_bytes
        return pieces

    @property
    def input_bytes(self) -> list[int]:
        """The bytes of each unit's inputs in the file, of those that have any."""
        units = [sum(each.num_bytes for each in extents if each.is_input) for extents in list(self._units.values())]
        return [num_bytes for num_bytes in units if num_bytes]

    def _add(self, unit: Hashable, spec: Spec, *, is_input: bool) -> tuple[_Extent, mmap.mmap]:
        """Give a unit a further extent, and show it."""
        self._give_up(unit)
        num_bytes = extent_bytes(spec)
        start = self._place(num_bytes)
        try:
            pages = mmap.mmap(self._file, num_bytes, flags=mmap.MAP_SHARED, offset=start)
        except OSError as error:
            raise _named(error, self.path) from None
        weakref.finalize(pages, self._free.append, (start, num_bytes)).atexit = False
        extent = _Extent(start, num_bytes, spec, weakref.ref(pages), is_input)
        self._units.setdefault(unit, []).append(extent)
        return extent, pages

    def expect(self, units: Sequence[Hashable]) -> None:
        """Begin a walk: these units will be read, in this order. Pages that were touched since the last are dropped."""
        self._next = dict(itertools.pairwise(units))
        for extents in list(self._units.values()):
            for extent in extents:
                self._drop_pages(extent)

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
        following = self._next.get(unit)
        if following is not None and self._slot_of(following) is None:
            self._begin_reading(following)
        return list(self._views(slot))

    def write(self, unit: Hashable) -> None:
        """Begin to write back the tensors that `read` returned; from now on they may be read, but not changed."""
        slot = self._slot_of(unit)
        assert slot is not None, "the unit was not read"
        slot.is_dirty = True
        slot.writing = self._begin(slot, _write)
        self._writing[unit] = slot.writing
        self.bytes_written += sum(extent.num_bytes for extent in self._units[unit] if not extent.is_input)

    def will_read(self, unit: Hashable) -> None:
        """Begin to read the first tensors of a unit, which will be read through their views; any thread may call it.

        Else the kernel reads around each page that is asked for, megabytes of other units (``read_ahead_kb``).
        """
        pages = self._units[unit][0].pages()
        if pages is not None and hasattr(mmap, "MADV_WILLNEED"):
            pages.madvise(mmap.MADV_WILLNEED)

    def forget_pages(self, unit: Hashable) -> None:
        """Let the kernel have the memory of what was read or written through views of a unit; any thread may call it.

        Values that were written stay, in the kernel's cache or in the file.
        """
        for extent in self._units.get(unit, ()):
            self._drop_pages(extent)

    def wait(self, unit: Hashable) -> None:
        """Wait until the unit's last write is over; any thread may call it.

        Raises:
            OSError: it failed.
        """
        for piece in self._writing.get(unit, ()):
            piece.result()
        self._writing.pop(unit, None)  # who writes to the file from now on does not write to the slot

    @contextmanager
    def in_memory(self, unit: Hashable) -> Generator[Iterator[Tensor] | None]:
        """A unit's tensors, if `write` wrote them last and a slot has them yet, which it keeps meanwhile; or None."""
        with self._keeps_slots:
            slot = next((slot for slot in self._slots if slot.unit is unit), None) if unit in self._writing else None
            yield None if slot is None else self._views(slot)

    def settle(self) -> None:
        """Wait for all writes, and give up the copies in the slots.

        Raises:
            OSError: a write failed. Its tensors are still in their slot, and are written again by the next call.
        """
        for slot in self._slots:
            self._finish_writing(slot)
        # The next walk's slots are made now, so that accounts are the same at any time of it.
        largest, num_slots = max(map(self._bytes_of, self._units), default=0), min(NUM_SLOTS, len(self._units))
        self._slots = [*self._slots, *(_Slot(_pages(largest)) for _ in range(num_slots - len(self._slots)))]
        self._writing = {}
        for slot in self._slots:
            self._vacate(slot)
            if len(slot.memory) < largest:
                slot.memory = _pages(largest)

    def close(self) -> None:
        """Wait for reads and writes, then remove the file unless it is kept, and unlock it. May be called twice."""
        self._end()

    def _place(self, num_bytes: int) -> int:
        """Find room for an extent; that of one that is gone, if there is any."""
        for span in list(self._free):
            start, there = span
            if there >= num_bytes:
                self._free.remove(span)
                if there > num_bytes:
                    self._free.append((start + num_bytes, there - num_bytes))
                return start
        start = self.num_bytes
        _reserve(self._file, self.path, start, num_bytes)
        self.num_bytes += num_bytes
        return start

    def _drop_pages(self, extent: _Extent) -> None:
        """Let the kernel have the memory of what was read or written through a view; values that changed stay."""
        pages = extent.pages()
        if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._file, extent.start, extent.num_bytes, os.POSIX_FADV_DONTNEED)

    def _bytes_of(self, unit: Hashable) -> int:
        return sum(extent.num_bytes for extent in self._units[unit])

    def _give_up(self, unit: Hashable) -> None:
        """Give up the copy of a unit that is about to be larger."""
        slot = self._slot_of(unit)
        if slot is not None:
            self._finish_writing(slot)
            self._vacate(slot)

    def _vacate(self, slot: _Slot) -> None:
        wait(slot.reading)
        with self._keeps_slots:
            slot.reading, slot.unit = [], None

    def _slot_of(self, unit: Hashable) -> _Slot | None:
        """The slot that has a unit, which is then the one used last."""
        slot = next((slot for slot in self._slots if slot.unit == unit), None)
        if slot is not None:
            self._use(slot)
        return slot

    def _use(self, slot: _Slot) -> None:
        """Put a slot at the end of the list: of another list, as accounts of another thread may read this one."""
        self._slots = [*(other for other in self._slots if other is not slot), slot]

    def _free_slot(self, unit: Hashable) -> _Slot:
        """Give a unit a slot: a new one, or that used longest ago once nothing of it is under way."""
        if len(self._slots) < min(NUM_SLOTS, len(self._units)):
            slot = _Slot(_pages(0))
        else:
            slot = self._slots[0]
            self._finish_writing(slot)  # raises before the slot is taken: what the file lacks stays there
            self._vacate(slot)  # a unit may have been read ahead, and then another one was asked for
        if len(slot.memory) < (needed := max(map(self._bytes_of, self._units))):
            slot.memory = _pages(needed)
        slot.unit = unit
        self._use(slot)
        return slot

    def _begin_reading(self, unit: Hashable) -> _Slot:
        for piece in self._arriving.pop(unit, ()):
            piece.result()  # raises before a slot is taken
        slot = self._free_slot(unit)
        slot.reading = self._begin(slot, _read)
        self.bytes_read += self._bytes_of(unit)
        return slot

    def _begin(self, slot: _Slot, copy: Callable[[int, Path, memoryview, int], None]) -> list[Future[None]]:
        view, parts = memoryview(slot.memory), list[tuple[memoryview, int]]()
        for extent in self._units[slot.unit]:
            cuts = range(0, 0 if extent.is_input and copy is _write else extent.num_bytes, PIECE_BYTES)
            parts += [(view[at : min(at + PIECE_BYTES, extent.num_bytes)], extent.start + at) for at in cuts]
            view = view[extent.num_bytes :]
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

    def _views(self, slot: _Slot) -> Iterator[Tensor]:
        start = 0
        for extent in self._units[slot.unit]:
            yield from _tensors(slot.memory, extent.spec, start)
            start += extent.num_bytes


def _tensors(memory: mmap.mmap, spec: Spec, at: int) -> Iterator[Tensor]:
    """The tensors that lie in ``memory`` one after another from the byte ``at`` on."""
    content = torch.frombuffer(memory, dtype=torch.uint8)
    for numel, dtype in spec:
        end = at + numel * dtype.itemsize
        yield content[at:end].view(dtype)
        at += room(end - at)


def _pages(num_bytes: int) -> mmap.mmap:
    try:
        return anonymous_pages(max(num_bytes, BLOCK_BYTES))  # huge ones: for a disk 2.5 times as fast (bench device)
    except OSError as error:  # of memory: no path has failed
        what = f"{error.strerror}: {num_bytes:,} bytes for state on its way to or from its file"
        raise MemoryError(what) from None


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


def lock(file: int, path: Path) -> None:
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
            raise UserError("offload.path", what, "free space, or name a folder on another disk") from _named(
                error, path
            )
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise _named(error, path) from None
        zeros = memoryview(_pages(min(num_bytes, PIECE_BYTES)))  # it cannot: a view of what is missing would end the
        for at in range(start, start + num_bytes, PIECE_BYTES):  # process if there were no room (SIGBUS)
            _write(file, path, zeros[: min(PIECE_BYTES, start + num_bytes - at)], at)


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


def _write_after(after: Callable[[], None] | None, file: int, path: Path, data: memoryview, at: int) -> None:
    if after is not None:
        after()
    _write(file, path, data, at)


def _named(error: OSError, path: Path) -> OSError:
    """The same error with the file's name, which errors of a descriptor lack."""
    return OSError(error.errno, error.strerror, os.fspath(path))


def _end(threads: ThreadPoolExecutor, file: int, remove: Path | None) -> None:
    threads.shutdown(wait=True)
    if remove is not None:
        remove.unlink(missing_ok=True)  # before it is unlocked: then another run may have it
    os.close(file)
    if remove is not None:
        _remove_folder(remove.parent)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MADE).touch()


def _remove_folder(folder: Path) -> None:
    """Remove a folder that was made for files of ranks, once there is none in it."""
    with suppress(OSError):  # another rank has just done so
        while os.listdir(folder) == [MADE]:
            (folder / MADE).unlink()
            try:
                folder.rmdir()
            except OSError as error:  # another rank has made its file meanwhile: then its end removes the folder
                (folder / MADE).touch()
                if error.errno != errno.ENOTEMPTY:
                    return
