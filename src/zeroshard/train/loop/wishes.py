"""The wish to stop, as two numbers that ranks add up in a message that they exchange anyway.

A signal may have reached one rank alone. If ranks want to stop for different reasons, one of these gives the exit
status: SIGTERM goes before Ctrl-C, and that before SIGUSR1.
"""

from __future__ import annotations

from zeroshard.errors import ExitStatus

STOPPED = (ExitStatus.TERMINATED, ExitStatus.INTERRUPTED, ExitStatus.PREEMPTED)
_ONE_OF_MANY = 2.0**-20  # so that the interrupts of all ranks add up to less than one wish of the other kind


def as_numbers(wish: ExitStatus) -> tuple[float, float]:
    """Return two numbers that stand for one rank's wish; (0, 0): it goes on."""
    others = {ExitStatus.TERMINATED: 1.0, ExitStatus.INTERRUPTED: _ONE_OF_MANY}
    return float(wish == ExitStatus.PREEMPTED), others.get(wish, 0.0)


def wish_of_all(preempted: float, others: float) -> ExitStatus:
    """Return the status with which all ranks stop, from the sums of their numbers; OK: nobody wants to."""
    if others >= 1.0:
        return ExitStatus.TERMINATED
    if others:
        return ExitStatus.INTERRUPTED
    return ExitStatus.PREEMPTED if preempted else ExitStatus.OK
