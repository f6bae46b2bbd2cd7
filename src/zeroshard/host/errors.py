"""User errors as one line each, the exit statuses of the `zeroshard` command, and the classification of OS errors."""

from __future__ import annotations

import errno
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from enum import IntEnum

from zeroshard.host.masked_addresses import masked

# Errors of a full or broken disk; any other error with a path is about the path itself.
_STORAGE_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})


class ExitStatus(IntEnum):
    """Exit statuses of the `zeroshard` command."""

    OK = 0
    FAILED = 1  # the run failed; a bug of ours shows its traceback
    USAGE = 2  # the user's input is wrong: one line on stderr
    CHECK_FAILED = 3  # the requested check failed, such as a plan in which nothing fits
    PEER_LOST = 4  # a peer hung or was lost
    STORAGE = 5  # a disk or a folder failed, so that something was not written
    NOT_FINITE = 6  # loss or gradients stayed NaN/Inf, or replicas diverged
    OUT_OF_MEMORY = 7  # under --fit; the next start needs less
    INTERRUPTED = 130  # Ctrl-C
    PREEMPTED = 138  # SIGUSR1, after a saved checkpoint
    TERMINATED = 143  # SIGTERM or SIGHUP, after a saved checkpoint


class UserError(ValueError):
    """Invalid user input: the field (or argument), what is wrong with it, and what to do.

    The command prints ``str(error)``, one line, after ``error: `` and exits with status 2. Addresses in it lose their
    secrets (`zeroshard.host.masked_addresses`).
    """

    def __init__(self, field: str, what: str, todo: str) -> None:
        self.field, self.what, self.todo = map(masked, (field, what, todo))
        super().__init__(f"{self.field or repr(field)}: {self.what}; {self.todo}")

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        return type(self), (self.field, self.what, self.todo)


def warn(line: str) -> None:
    """Print a one-line warning on stderr."""
    print(f"warning: {masked(line)}", file=sys.stderr, flush=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU (torch's OutOfMemoryError, recognised by its name) or a CPU."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # the last one is the message of the loader if a library does not fit into memory
    said = ("can't allocate memory", "annot allocate memory", "failed to map segment", "std::bad_alloc")
    return not names.isdisjoint({"OutOfMemoryError", "MemoryError"}) or any(text in str(error) for text in said)


def is_out_of_threads(error: BaseException) -> bool:
    """Whether a thread could not be started: because of a limit on processes, or on memory for its stack."""
    said = ("can't start new thread", "unable to start watchdog thread")  # the last one is faulthandler's
    return isinstance(error, RuntimeError) and any(text in str(error) for text in said)


def path_line(error: OSError) -> tuple[ExitStatus, str] | None:
    """The exit status and the error line for a path, or its disk, that cannot be used; None if there is no path."""
    why = error.strerror or str(error)
    if error.errno in _STORAGE_FAILS:
        where = "the disk" if error.filename is None else str(error.filename)
        return ExitStatus.STORAGE, f"{where}: {why}; free space, or name a place on another disk"
    if error.filename is None:
        return None
    return ExitStatus.USAGE, f"{shortened(error.filename)}: {why}; name a path that can be used"


def unknown_name(field: str, given: str, known: Sequence[str]) -> UserError:
    """Return the error for ``given``, which is not in ``known``: it suggests the nearest name and lists all of them."""
    near = nearest_name(given, known)
    guess = "" if near is None else f"did you mean {near!r}? "
    return UserError(field, f"{given!r} is unknown", f"{guess}choose one of {', '.join(known)}")


def nearest_name(given: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The name in ``known`` that ``given`` was probably meant to be; None if no name is similar.

    Names with the same letters in another order are preferred: for ``--gpsu`` it is ``--gpus`` and not ``--gpu``,
    although that one has more letters in the same order. ``cutoff``: as in `difflib.get_close_matches`.
    """
    known = list(known)
    reordered = [name for name in known if sorted(name) == sorted(given)]
    close = get_close_matches(given, reordered or known, n=1, cutoff=0.0 if reordered else cutoff)
    return close[0] if close else None


def shown(value: object, longest: int = 200) -> str:
    """``repr(value)``, shortened, for a message; never raises, although Python refuses to print very large integers."""
    try:
        return shortened(repr(value), longest)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to print"


def shortened(value: object, longest: int = 200) -> str:
    """``value`` as text; if it has more than ``longest`` characters, the middle is replaced by ``...``."""
    text = str(value)
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-(longest // 2) :]}"


class FirstRankStorageError(OSError):
    """Raised on all ranks but 0 if rank 0 had a storage error, which rank 0 itself reports."""


def is_of_storage(error: OSError) -> bool:
    """Whether an error is about a disk or a folder, and not about the network or this process's own limits."""
    of_network = isinstance(error, ConnectionError | TimeoutError | socket.gaierror)
    return not of_network and error.errno not in _NOT_OF_STORAGE


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_OF_STORAGE = {
    *(errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENOTCONN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
}


def storage_line(where: object, error: OSError, then: str) -> str:
    """The error line for a disk or a folder that failed, with what to do about it; ``then``: what to do afterwards."""
    todo = "free space" if error.errno in _FULL else "see that it is there and may be written"
    return f"{where}: {error}; {todo}, {then}"


def memory_line(error: BaseException, todo: str) -> str:
    """The error line for memory that ran out: the requested size, if the allocator named it, and what to do."""
    asked = re.search(r"(?:tried|unable) to allocate (?P<count>[\d.]+) (?P<unit>bytes|[KMGTPE]?i?B)", str(error), re.I)
    if asked is None:
        return f"memory: ran out; {todo}"
    more = f"{asked['count']} {asked['unit']}"
    if asked["unit"] == "bytes":
        count = int(asked["count"])
        more = f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.3f} MiB"
    return f"memory: ran out, where {more} more were asked for; {todo}"
