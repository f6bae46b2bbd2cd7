"""Signals that ask a run to stop: it finishes its step, saves a checkpoint and exits with a status of its own.

`kill`, Kubernetes and SLURM send SIGTERM. A terminal that is closed sends SIGHUP (``nohup`` makes a process ignore it,
and then it is ignored here too). SLURM sends SIGUSR1 ahead of its time limit if asked to (``#SBATCH
--signal=USR1@120``). A signal may reach one rank alone, or all of them at different steps. So the loop asks every rank
at each step, and all ranks stop if any of them received one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from zeroshard.launch.rank_exit import saves_before_end

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def stop_signals_noted() -> Generator[Callable[[], int]]:
    """Context manager in which a signal of `STOPPING` does not end the process but is noted.

    It yields a function that returns the number of the first signal that was received, 0 if none was.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # Python runs signal handlers only in the main thread
        return

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signum)

    heard = (number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN)
    before = {number: signal.signal(number, note) for number in heard}
    try:
        with saves_before_end():
            yield lambda: noted[0] if noted else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
