"""Signals that ask a run to stop: it saves after the step that it is in, and ends in a status of its own.

SIGTERM is what `kill`, Kubernetes and SLURM send; SIGHUP what a terminal sends that is closed (``nohup`` has it
ignored, and then it is ignored here too); SIGUSR1 what SLURM sends ahead of time where it is asked to
(``#SBATCH --signal=USR1@120``). Any of them may reach one rank alone or all of them, at different steps: the loop asks
every rank at each step and one wish is everybody's.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from zeroshard.launch.leaving import saves_before_end

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def stop_signals_noted() -> Generator[Callable[[], int]]:
    """Inside, `STOPPING` signals do not end the process.

    The function that is handed out returns the number of the first that came, 0 where none did.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # Python runs signal handlers in the main thread alone
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
