"""What the user did wrong, said once and in one line; and how each ending of the program is told to the shell."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum

# What a disk that is full or broken answers; any other refusal of a path is about the path.
_STORAGE_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})


class ExitStatus(IntEnum):
    """Exit statuses of the `zeroshard` command."""

    OK = 0
    FAILED = 1  # the run failed; a bug of ours shows its traceback
    USAGE = 2  # the user's input is wrong: one line on stderr
    CHECK_FAILED = 3  # the check that was asked for says no
    PEER_LOST = 4  # a peer hung or was lost
    STORAGE = 5
    NOT_FINITE = 6  # not finite or diverged
    MOVED_UP = 7  # memory ran out under --strategy auto; the next start is a stage higher
    INTERRUPTED = 130  # Ctrl-C
    PREEMPTED = 138  # SIGUSR1, after a saved checkpoint
    TERMINATED = 143  # SIGTERM or SIGHUP, after a saved checkpoint


class UserError(ValueError):
    """Input that cannot be used: which field (or word), what is wrong with it, what to do.

    ``str(error)`` is the one line that the command line prints after ``error: `` and exits with status 2.
    """

    def __init__(self, field: str, what: str, todo: str) -> None:
        self.field, self.what, self.todo = field, what, todo
        super().__init__(f"{field or repr(field)}: {what}; {todo}")

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        return type(self), (self.field, self.what, self.todo)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU (torch's OutOfMemoryError, known by its name) or a CPU."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # the last: what the loader says of a library that it has no room for
    said = ("can't allocate memory", "annot allocate memory", "failed to map segment")
    return not names.isdisjoint({"OutOfMemoryError", "MemoryError"}) or any(text in str(error) for text in said)


def is_out_of_threads(error: BaseException) -> bool:
    """Whether the system gave no further thread: a limit on processes, or on the memory that a stack needs."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def path_line(error: OSError) -> tuple[ExitStatus, str] | None:
    """The exit status and the one line of a path, or its disk, that the system refused; None where it names none."""
    why = error.strerror or str(error)
    if error.errno in _STORAGE_FAILS:
        where = "the disk" if error.filename is None else str(error.filename)
        return ExitStatus.STORAGE, f"{where}: {why}; free space, or name a place on another disk"
    if error.filename is None:
        return None
    return ExitStatus.USAGE, f"{shortened(error.filename)}: {why}; name a path that can be used"


def nearest_name(given: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The name in ``known`` that ``given`` was probably meant to be; None where none looks like it.

    A name of the same letters in another order comes first: of ``--gpsu`` it is ``--gpus`` and not ``--gpu``, although
    that one has more letters in the same order. ``cutoff``: as `difflib.get_close_matches` takes it.
    """
    known = list(known)
    reordered = [name for name in known if sorted(name) == sorted(given)]
    close = get_close_matches(given, reordered or known, n=1, cutoff=0.0 if reordered else cutoff)
    return close[0] if close else None


def shown(value: object, longest: int = 200) -> str:
    """``repr(value)``, the middle left out, for a message; Python refuses to write integers of thousands of digits."""
    try:
        return shortened(repr(value), longest)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to print"


def shortened(value: object, longest: int = 200) -> str:
    """``value`` as text of at most so many letters, the middle left out."""
    text = str(value)
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-(longest // 2) :]}"


class FirstRankStorageError(OSError):
    """Rank 0 met an error of storage, and tells it; the other ranks raise this one."""


def is_of_storage(error: OSError) -> bool:
    """Whether a disk or a folder failed, and not the network or this process's own limits."""
    elsewhere = isinstance(error, ConnectionError | TimeoutError | socket.gaierror)
    return not elsewhere and error.errno not in _NOT_OF_STORAGE


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_OF_STORAGE = {
    *(errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENOTCONN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
}


def storage_line(where: object, error: OSError, then: str) -> str:
    """The one line about a disk or a folder that failed, and what to do about it; ``then``: what to do afterwards."""
    todo = "free space" if error.errno in _FULL else "see that it is there and may be written"
    return f"{where}: {error}; {todo}, {then}"


def memory_line(error: BaseException, todo: str) -> str:
    """The one line about memory that ran out: how much was asked for, if the allocator said so, and what to do."""
    asked = re.search(r"(?:tried|unable) to allocate (?P<count>[\d.]+) (?P<unit>bytes|[KMGTPE]?i?B)", str(error), re.I)
    if asked is None:
        return f"memory: ran out; {todo}"
    more = f"{asked['count']} {asked['unit']}"
    if asked["unit"] == "bytes":
        more = f"{int(asked['count']) / 2**30:,.2f} GiB"
    return f"memory: ran out, where {more} more were asked for; {todo}"
