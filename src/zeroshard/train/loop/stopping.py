"""Signals that ask a run to stop: it finishes its step, saves a checkpoint and exits with a status of its own.

Ctrl-C sends SIGINT; a second one ends the run at once. `kill`, Kubernetes and SLURM send SIGTERM. A terminal that is
closed sends SIGHUP (``nohup`` makes a process ignore it, and then it is ignored here too). SLURM sends SIGUSR1 ahead of
its time limit if asked to (``#SBATCH --signal=USR1@120``). A signal may reach one rank alone, or all of them at
different steps. So the loop asks every rank at each step, and all ranks stop if any of them received one. What a rank
wants is two numbers that ranks add up in a message that they exchange anyway. If ranks want to stop for different
reasons, one of these gives the exit status: SIGTERM goes before Ctrl-C, and that before SIGUSR1.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from zeroshard.host.errors import ExitStatus
from zeroshard.host.launch.rank_exit import saves_before_end

_SAID = "stopping after this step; Ctrl-C again ends it at once"
STOPPED = (ExitStatus.TERMINATED, ExitStatus.INTERRUPTED, ExitStatus.PREEMPTED)
_ONE_OF_MANY = 2.0**-20  # so that the interrupts of all ranks add up to less than one of the other kind
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def stop_signals_noted(*, speaks: bool = False) -> Generator[Callable[[], int]]:
    """Context manager in which a signal of `STOPPING` does not end the process but is noted; a second SIGINT ends it.

    It yields a function that returns the number of the first signal that was received, 0 if none was. If it
    ``speaks``, it says on a terminal what Ctrl-C does.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # Python runs signal handlers only in the main thread
        return

    def note(signum: int, frame: FrameType | None) -> None:
        again = signum == signal.SIGINT and signum in noted
        noted.append(signum)
        end = before[signal.Signals(signum)]
        if again and callable(end):
            end(signum, frame)
        elif signum == signal.SIGINT and speaks and sys.stderr.isatty():
            # in a thread: the signal may have come in the middle of a line that is being printed
            threading.Thread(target=print, args=(_SAID,), kwargs={"file": sys.stderr, "flush": True}).start()

    before = {number: signal.getsignal(number) for number in STOPPING}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        with saves_before_end():
            yield lambda: noted[0] if noted else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def as_numbers(stop: ExitStatus) -> tuple[float, float]:
    """Return two numbers that stand for one rank's reason to stop; (0, 0): it goes on."""
    others = {ExitStatus.TERMINATED: 1.0, ExitStatus.INTERRUPTED: _ONE_OF_MANY}
    return float(stop == ExitStatus.PREEMPTED), others.get(stop, 0.0)


def agreed_stop(preempted: float, others: float) -> ExitStatus:
    """Return the status with which all ranks stop, from the sums of their numbers; OK: nobody wants to."""
    if others >= 1.0:
        return ExitStatus.TERMINATED
    if others:
        return ExitStatus.INTERRUPTED
    return ExitStatus.PREEMPTED if preempted else ExitStatus.OK
