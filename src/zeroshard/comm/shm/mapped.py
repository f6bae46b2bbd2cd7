"""Shared memory between the ranks of one host, and counters in it to wait on.

The memory is a file without a name (``memfd_create``, Linux): other processes of this user open it through the owner's
``/proc/PID/fd``, it needs no room in ``/dev/shm``, and it is gone with the last process that maps it.

[Note: what the counters rely on] A counter is an aligned 8-byte word with one writer, and it only grows. Its writer
first writes the data that it announces, then the counter; a reader sees the counter, then reads the data. On x86-64
stores become visible in program order, and loads are executed in program order. On arm64 neither is guaranteed, so both
sides put a fence between counter and data: release and then acquire of a lock, which POSIX requires to synchronise
memory and which compile to a store-release followed by a load-acquire that no access may cross. The word is written in
one store, a copy of 8 aligned bytes; a reader of half a word could at worst sleep once more.

A rank that waits sleeps in the kernel until the word changes (by futex; without futexes it polls). Spinning would take
the core, and the interpreter's lock, from computation.

[Note: the dead are noticed] Each rank holds a POSIX lock on its own segment. The kernel drops the lock when the process
ends, however it ends. A rank that has waited for `_LOOK_S` tries to take the peer's lock. The kernel also drops it when
the process closes any descriptor of that file, such as the copy that a mapping keeps: mappings live as long as it does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
import threading
import time

import torch
from torch import Tensor

from zeroshard.comm.base import PeerError
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import open_regular

LOST = 0  # the counter in which a rank reports a lost peer: that peer's number plus one
_LINE_BYTES = 64  # each counter has a cache line of its own: writing one does not slow down readers of another
NOTE_WORDS = _LINE_BYTES // 8
_PAGE_BYTES = 4096
CAN_SHARE = hasattr(os, "memfd_create")  # whether this system has what `Segment.create` needs
_NAME = "zeroshard-shm"
_NAP_S = 50e-6  # polling interval on systems without futexes
_LOOK_S = 0.5  # how often a waiting rank tries the peer's lock
# Number of the system call. It waits on 4 bytes: a counter's low half, which comes first on little-endian machines.
_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class Segment:
    """One rank's shared memory, which all ranks map: counters that only this rank writes, a note, and data.

    Made by `create` (on the rank that owns it) and `attach` (on the others).

    Args:
        fd: the open file.
        num_counters: how many counters the segment has; the first is `LOST`.

    Attributes:
        path: where other processes of this host open the file.
        counters: the counters, in order.
        note: eight words in which the owner describes what it announces in a counter.
        data: the bytes after the counters and the note, uint8 ``[data_bytes]``.
    """

    def __init__(self, fd: int, rank: int, num_counters: int) -> None:
        self.rank = rank
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
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
        """Make this rank's segment, filled with zeros.

        Raises:
            UserError: there is not enough memory, or this system has no such files.
        """
        if not CAN_SHARE:
            raise UserError("comm", "shared memory needs Linux", "use ring")
        num_bytes = _header_bytes(num_counters) + data_bytes
        fd = os.memfd_create(_NAME)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX)  # [Note: the dead are noticed]
            _reserve(fd, 0, num_bytes)
            return cls(fd, rank, num_counters)
        except OSError as error:
            os.close(fd)
            what = f"{num_bytes} bytes of shared memory cannot be allocated ({error.strerror})"
            raise UserError("comm", what, "make room, or use ring") from None

    @classmethod
    def attach(cls, path: str, rank: int, num_counters: int) -> Segment:
        """Map rank ``rank``'s segment from its `path`, which that rank has told us.

        Raises:
            OSError: the file cannot be opened, or is no segment that a process of this user has made.
        """
        fd = open_regular(path, os.O_RDWR)
        try:
            facts, name = os.fstat(fd), os.readlink(f"/proc/self/fd/{fd}")
            if (name, facts.st_uid) != (f"/memfd:{_NAME} (deleted)", os.geteuid()):
                raise OSError(errno.EINVAL, "it is no shared memory of this user's ranks", path)
            return cls(fd, rank, num_counters)
        except BaseException:
            os.close(fd)
            raise

    def extend(self, num_bytes: int) -> tuple[int, mmap.mmap]:
        """Lengthen the file by ``num_bytes``; return where they start in the file, and a mapping of them.

        Only the owner may call it. No page of them is allocated before `reserve`.

        Raises:
            OSError: this process may map no more.
        """
        start = self._num_bytes
        os.ftruncate(self._fd, start + num_bytes)
        self._num_bytes += num_bytes
        try:
            return start, self.map(start, num_bytes)
        except OSError:
            # mmap has closed its copy of the descriptor, and POSIX drops a process's locks on a file with any of them
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            raise

    def reserve(self, start: int, num_bytes: int) -> None:
        """Allocate the pages of the ``num_bytes`` that begin at ``start``.

        Raises:
            OSError: there is not enough memory for them.
        """
        _reserve(self._fd, start, num_bytes)

    def map(self, start: int, num_bytes: int) -> mmap.mmap:
        """Map ``num_bytes`` of the file from ``start``, which an `extend` has added."""
        return mmap.mmap(self._fd, num_bytes, offset=start)

    def owner_lives(self) -> bool:
        """Return whether the process that owns this segment still runs; only for segments of other processes."""
        return _is_locked(self._fd)

    def close(self) -> None:
        """Close the file, which drops the lock; memory is freed with the last tensor in it. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Counter:
    """A counter in a segment: its owner advances it, other ranks wait for it."""

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
        """Set the counter to ``value`` and wake its waiters; they see everything that was written before the call."""
        _fence()
        self._words[self._word] = value
        _wake(self._address)

    def wait(self, value: int, timeout_s: float) -> None:
        """Sleep until the count is at least ``value``.

        Raises:
            PeerError: the owner is gone, or has lost a peer itself, or ``timeout_s`` seconds have passed.
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
        """Raise PeerLost if waiting is in vain. ``waited_s``: the time limit if it has been exceeded, else 0."""
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
    """Rank ``rank`` has ended, or does not answer."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} is gone: {why}; see what it printed")
        self.rank = rank


def _header_bytes(num_counters: int) -> int:
    return -(-(num_counters + 1) * _LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES


def _reserve(fd: int, start: int, num_bytes: int) -> None:
    os.posix_fallocate(fd, start, num_bytes)  # else memory that runs out later is a bus error


def _is_locked(fd: int) -> bool:
    """Return whether another process holds the lock on the file."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return False


_lock = threading.Lock()


def _fence() -> None:
    """Act as a memory fence: no load or store moves across it; see [Note: what the counters rely on]."""
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
    """Sleep until woken, for at most `_LOOK_S`; return at once if the word at ``address`` is no longer ``seen``."""
    if _FUTEX_NUMBER:
        low = ctypes.c_int32(seen & 0xFFFFFFFF).value
        _syscall(_FUTEX_NUMBER, address, _FUTEX_WAIT, low, ctypes.addressof(_LOOK), None, 0)
    else:
        time.sleep(_NAP_S)


def _wake(address: int) -> None:
    if _FUTEX_NUMBER:
        _syscall(_FUTEX_NUMBER, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)
