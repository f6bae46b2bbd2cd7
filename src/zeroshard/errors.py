"""What the user did wrong, said once and in one line; and how each ending of the program is told to the shell."""

from __future__ import annotations

import re
from enum import IntEnum


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
    TERMINATED = 143  # SIGTERM, after a saved checkpoint


class UserError(ValueError):
    """Input that cannot be used: which field, what is wrong with it, what to do.

    ``str(error)`` is the one line that the command line prints after ``error: `` and exits with status 2.
    """

    def __init__(self, field: str, what: str, todo: str) -> None:
        self.field, self.what, self.todo = field, what, todo
        super().__init__(f"{field}: {what}; {todo}")

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        return type(self), (self.field, self.what, self.todo)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU (torch's OutOfMemoryError, known by its name) or a CPU."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint({"OutOfMemoryError", "MemoryError"}) or "can't allocate memory" in str(error)


def memory_line(error: BaseException, todo: str) -> str:
    """The one line about memory that ran out: how much was asked for, if the allocator said so, and what to do."""
    asked = re.search(r"(?:tried|unable) to allocate (?P<count>[\d.]+) (?P<unit>bytes|[KMGTPE]?i?B)", str(error), re.I)
    if asked is None:
        return f"memory: ran out; {todo}"
    more = f"{asked['count']} {asked['unit']}"
    if asked["unit"] == "bytes":
        more = f"{int(asked['count']) / 2**30:,.2f} GiB"
    return f"memory: ran out, where {more} more were asked for; {todo}"
