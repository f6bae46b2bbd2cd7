"""Why a group of ranks ended: after one rank fails the others fail too, and only the first failure is reported."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from zeroshard.host.errors import ExitStatus

_SIGNAL_TODO = {
    "SIGKILL": "look for a lack of memory here",
    # the kernel sends SIGBUS when a mapped page is read that has no file behind it any more
    "SIGBUS": "a token file was cut off while it was read, or its disk failed: prepare the data again, then resume",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a group of ranks ended.

    Attributes:
        status: the exit status to pass on.
        line: what to print; may be empty.
        killed_rank: the rank that SIGKILL ended, if that was the cause.
    """

    status: int
    line: str = ""
    killed_rank: int | None = field(default=None, compare=False)


def root_cause(failures: Mapping[int, tuple[int, str]]) -> Ending:
    """Find the ending of a group, from its ranks' failures.

    A rank that was killed takes precedence: its peers fail after it, and because of it. A user error comes next.

    Args:
        failures: by rank, its exit code (negative for a signal) and its message, in the order in which ranks ended.
    """
    for code, message in failures.values():
        if code == ExitStatus.OUT_OF_MEMORY:
            return Ending(code, message)
    if (ExitStatus.PEER_LOST, "") in failures.values():  # that rank has printed why itself: see `end_as_peer_lost`
        return Ending(ExitStatus.PEER_LOST)
    for rank, (code, _) in failures.items():
        if code < 0 and -code not in (signal.SIGTERM, signal.SIGINT):
            name = signal.Signals(-code).name
            todo = _SIGNAL_TODO.get(name, "report it with `zeroshard doctor`")
            killed_rank = rank if -code == signal.SIGKILL else None
            return Ending(ExitStatus.PEER_LOST, f"rank {rank}: was ended by {name}; {todo}", killed_rank)
    for _, (code, message) in sorted(failures.items()):
        if code == ExitStatus.USAGE:
            return Ending(code, message)
    # A rank that lost a peer ended because of another rank. So may one that was sent SIGTERM: once a rank has ended,
    # the agent sends it to all others. Both count as the cause only if there is no other candidate.
    asked = (ExitStatus.TERMINATED, -signal.SIGTERM)
    for consequences in ((ExitStatus.PEER_LOST, *asked), (ExitStatus.PEER_LOST,)):
        causes = [failure for _, failure in sorted(failures.items()) if failure[0] not in consequences]
        if causes:
            code, message = max(causes)  # of two with the same code, one that has left a message
            return Ending(
                code if code > 0 else 128 - code,
                message if code in (ExitStatus.FAILED, ExitStatus.CHECK_FAILED) else "",
            )
    return Ending(ExitStatus.PEER_LOST, next(message for _, (_, message) in sorted(failures.items())))
