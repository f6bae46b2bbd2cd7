"""Memory that the ranks of one host map together, and counters in it to wait on.

[Note: what the counters rely on] A counter is an aligned 8-byte word with one writer, and it only grows. Its writer
first writes the data that it announces, then the counter; a reader sees the counter, then reads the data. On x86-64
stores become visible in program order and loads are made in it. On arm64 neither holds by itself, so both sides put
a fence between counter and data: release and then acquire of a lock, which POSIX requires to synchronise memory and
which compile to a store-release followed by a load-acquire that no access may cross. The word is written in one
store, a copy of 8 aligned bytes; a reader of half a word could at worst sleep once more.

A rank that waits sleeps in the kernel until the word changes (futex; elsewhere it naps), for spinning would take the
core from a computation and the interpreter's lock with it.

[Note: the dead are noticed] Each rank holds a POSIX lock on its own segment, which the kernel drops when the process
ends, however it ends; who has waited for a while tries that lock.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.comm.base import PeerError
from zeroshard.errors import UserError
from zeroshard.regular_files import open_regular

LOST = 0  # the counter in which a rank notes, plus one, which peer it has lost
_LINE_BYTES = 64  # counters of one writer do not share a cache line: each has another reader
NOTE_WORDS = _LINE_BYTES // 8
_PAGE_BYTES = 4096
_KIND = "zeroshard-shm-"
_PREFIX = _KIND
_STALE_S = 60.0  # a file this old that has not even got its name was left by a process that died
_NAP_S = 50e-6  # where the kernel cannot wake us
_LOOK_S = 0.5  # between looks at the peer's lock
_FUTEX = {"x86_64": 202, "aarch64": 98}  # the number of the system call, where a word's low half comes first
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class Segment:
    """One rank's memory: counters that it alone writes, and ``data`` (bytes) that all ranks map.

    Made by `create` and `attach`.

    Args:
        fd: the open file.
        path: its name.
        rank: whose it is.
        num_counters: how many counters it starts with; the first is `LOST`.

    Attributes:
        counters, data: what the segment was made with.
        note: eight words for whatever its owner announces in a counter.
    """

    def __init__(self, fd: int, path: Path, rank: int, num_counters: int) -> None:
        self.rank = rank
        self.path = path
        self._fd = fd
        memory = mmap.mmap(fd, 0)
        words = memoryview(memory).cast("Q")
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        lines = range(0, num_counters * _LINE_BYTES, _LINE_BYTES)
        self.counters = [Counter(self, words, line // 8, address + line) for line in lines]
        self.note = words[len(lines) * _LINE_BYTES // 8 :][:NOTE_WORDS]
        self.data: Tensor = torch.frombuffer(memory, dtype=torch.uint8)[_header_bytes(num_counters) :]
        self._num_bytes = len(memory)

    @classmethod
    def create(cls, rank: int, num_counters: int, data_bytes: int) -> Segment:
        """A segment of zeros. Its file must be removed with `unlink` as soon as all ranks have attached.

        Raises:
            UserError: there is not enough memory behind the folder.
        """
        place = folder()
        _sweep(place)
        num_bytes = _header_bytes(num_counters) + data_bytes
        fd, name = tempfile.mkstemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=place)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX)  # [Note: the dead are noticed]
            visible = os.path.join(place, os.path.basename(name)[1:])
            os.rename(name, visible)  # whoever sees it by that name finds it locked, as long as we live
            name = visible
            _reserve(fd, 0, num_bytes)
            return cls(fd, Path(name), rank, num_counters)
        except OSError as error:
            os.close(fd)
            os.unlink(name)
            what = f"{num_bytes} bytes of shared memory are not to be had in {place} ({error.strerror})"
            raise UserError("comm", what, "make room there, or use ring") from None

    @classmethod
    def attach(cls, path: Path, rank: int, num_counters: int) -> Segment:
        """Rank ``rank``'s segment, from its file, whose name another process has told.

        Raises:
            OSError: it cannot be opened from here, or is no segment that this user's process has just made.
        """
        fd = open_regular(path, os.O_RDWR, follow=False)
        try:
            _require_segment(fd, path, num_counters)
            return cls(fd, path, rank, num_counters)
        except BaseException:
            os.close(fd)
            raise

    def extend(self, num_bytes: int) -> tuple[int, mmap.mmap]:
        """Lengthen the file by ``num_bytes``, only for its owner; where that starts, and the memory.

        No page of it is there before `reserve`.
        """
        start = self._num_bytes
        os.ftruncate(self._fd, start + num_bytes)
        self._num_bytes += num_bytes
        return start, self.map(start, num_bytes)

    def reserve(self, start: int, num_bytes: int) -> None:
        """Have the pages of ``num_bytes`` from ``start`` on be there.

        Raises:
            OSError: there is no room for them.
        """
        _reserve(self._fd, start, num_bytes)

    def map(self, start: int, num_bytes: int) -> mmap.mmap:
        """Map a part of the file that `extend` made."""
        return mmap.mmap(self._fd, num_bytes, offset=start)

    def unlink(self) -> None:
        """Remove the file; the memory lives until the last rank has let go of it. Harmless twice."""
        self.path.unlink(missing_ok=True)

    def owner_lives(self) -> bool:
        """Whether the process that made this segment, which is not this one, still runs."""
        return _is_locked(self._fd)

    def close(self) -> None:
        """Close the file, and so drop the lock; the memory goes with the last tensor on it. Harmless twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Counter:
    """A word of a segment, which its owner advances and others wait for."""

    __slots__ = ("_address", "_segment", "_word", "_words")

    def __init__(self, segment: Segment, words: memoryview, word: int, address: int) -> None:
        self._segment = segment
        self._words = words
        self._word = word
        self._address = address

    @property
    def value(self) -> int:
        """The count, as this process sees it now."""
        return self._words[self._word]

    def advance(self, value: int) -> None:
        """Announce ``value``: who sees it, sees what was written before."""
        _fence()
        self._words[self._word] = value
        _wake(self._address)

    def wait(self, value: int, timeout_s: float) -> None:
        """Sleep until the count is at least ``value``.

        Raises:
            PeerError: the owner is gone, or has lost a peer itself, or ``timeout_s`` have passed.
        """
        words, word = self._words, self._word
        if words[word] < value:
            start_s = look_s = time.monotonic()
            while (seen := words[word]) < value:
                _sleep_while(self._address, seen)
                now_s = time.monotonic()
                if now_s - look_s > _LOOK_S:
                    look_s = now_s
                    self._look(value, timeout_s if now_s - start_s > timeout_s else 0.0)
        _fence()

    def _look(self, value: int, waited_s: float) -> None:
        """Raise if there is nothing to wait for; ``waited_s`` is not 0 when time is up."""
        owner = self._segment
        lives, lost = owner.owner_lives(), owner.counters[LOST].value
        if self.value >= value:
            return
        if lost:
            raise PeerLost(lost - 1, f"rank {owner.rank} found it so")
        if not lives:
            raise PeerLost(owner.rank, "its process has ended or closed the communicator")
        if waited_s:
            raise PeerLost(owner.rank, f"it did not answer within {waited_s:g} s")


class PeerLost(PeerError):
    """Rank ``rank`` will not answer any more."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} is gone: {why}; see what it printed")
        self.rank = rank


def folder() -> Path:
    """Where segments live: in memory where the system offers that as files, else among the temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def _header_bytes(num_counters: int) -> int:
    return -(-(num_counters + 1) * _LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES


def _require_segment(fd: int, path: Path, num_counters: int) -> None:
    """Raise OSError for a file that `Segment.create` has not made, or not for this user."""
    facts = os.fstat(fd)
    why = (
        "it is not called as a segment is"
        if not path.name.startswith(_KIND)
        else "it belongs to another user"
        if facts.st_uid != os.geteuid()
        else "others than its owner may write to it"
        if facts.st_mode & 0o077
        else "it has another name, too"
        if facts.st_nlink != 1
        else f"it has {facts.st_size} bytes"
        if facts.st_size <= _header_bytes(num_counters)
        else ""
    )
    if why:
        raise OSError(errno.EINVAL, why, str(path))


def _reserve(fd: int, start: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, num_bytes)  # a page that cannot be had later would be a bus error
    else:
        os.ftruncate(fd, max(os.fstat(fd).st_size, start + num_bytes))


def _is_locked(fd: int) -> bool:
    """Whether another process holds the lock on the file."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return False


def _sweep(place: Path) -> None:
    """Remove this user's segments whose makers died before they could.

    Those of this process are not even opened: to close a file drops its process's locks on it.
    """
    own = f"{_PREFIX}{os.getpid()}-"
    for path in (*place.glob(f"{_PREFIX}*"), *place.glob(f".{_PREFIX}*")):
        if path.name.removeprefix(".").startswith(own):
            continue
        try:
            fd = open_regular(path, os.O_RDWR, follow=False)
        except OSError:  # somebody else's, or just gone
            continue
        facts = os.fstat(fd)
        stale = not path.name.startswith(".") or time.time() - facts.st_mtime > _STALE_S
        if stale and facts.st_uid == os.geteuid() and not _is_locked(fd):
            path.unlink(missing_ok=True)
        os.close(fd)


_lock = threading.Lock()


def _fence() -> None:
    """No access moves across: [Note: what the counters rely on]."""
    with _lock:
        pass
    with _lock:
        pass


_FUTEX_NUMBER = _FUTEX.get(platform.machine(), 0) if sys.platform == "linux" and sys.byteorder == "little" else 0
_LOOK = _Timespec(0, int(_LOOK_S * 1e9))
_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
)


def _sleep_while(address: int, seen: int) -> None:
    """Sleep until woken, but not if the word at ``address`` is no longer ``seen``, and not for long."""
    if _FUTEX_NUMBER:
        low = ctypes.c_int32(seen & 0xFFFFFFFF).value
        _syscall(_FUTEX_NUMBER, address, _FUTEX_WAIT, low, ctypes.addressof(_LOOK), None, 0)
    else:
        time.sleep(_NAP_S)


def _wake(address: int) -> None:
    if _FUTEX_NUMBER:
        _syscall(_FUTEX_NUMBER, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)
