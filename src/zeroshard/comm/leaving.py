"""How a rank ends: with its launcher, soon after Ctrl-C, or at once and with a word.

[Note: nothing is left behind] A rank can sit in a collective, in C++, where Python runs no signal handler. So
there are three nets: the agent signals every rank and kills the deaf ones after `SHUTDOWN_GRACE_S`; after
Ctrl-C, and after SIGTERM where nothing is to be saved yet, a watching thread ends its own process within
`INTERRUPT_GRACE_S`; and the kernel kills a rank whose launcher has died.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

from zeroshard.comm.launch import end_with_starter, tell_launcher
from zeroshard.errors import ExitStatus

INTERRUPT_GRACE_S = 2.0  # from Ctrl-C to the end of a rank, wherever it is
_saves_first = threading.Event()


@contextmanager
def ended_with_launcher() -> Generator[None]:
    """Inside, this rank dies with its launcher, and soon after Ctrl-C: [Note: nothing is left behind]."""
    end_with_starter()
    if threading.current_thread() is not threading.main_thread():  # only there can a signal be waited for
        yield
        return
    # Python's handler needs the main thread; the C handler writes to this descriptor whatever that thread does
    heard, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    left = threading.Event()
    arguments = (heard, left)
    thread = threading.Thread(target=_end_after_interrupt, args=arguments, name="end-after-interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        told.close()


@contextmanager
def saves_before_end() -> Generator[None]:
    """Inside, SIGTERM does not end this rank soon: it has a checkpoint to write first."""
    _saves_first.set()
    try:
        yield
    finally:
        _saves_first.clear()


def end_as_peer_lost(line: str, speak: bool) -> NoReturn:
    """End this process now, from whichever thread: another one may sit in a collective for ever.

    With ``speak`` it says why at once, since the launcher speaks only when all ranks have ended.
    """
    tell_launcher("")
    if speak:
        print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(ExitStatus.PEER_LOST)


def end_at_once(line: str, status: ExitStatus) -> NoReturn:
    """End this process now with a status of its own, and have the launcher print ``line``, or print it."""
    if not tell_launcher(line):
        print(line, file=sys.stderr, flush=True)
    os._exit(status)


def _end_after_interrupt(heard: socket.socket, left: threading.Event) -> None:
    with heard:
        while signum := heard.recv(1):
            if signum[0] == signal.SIGINT:
                # the kernel's timer also reaches a process whose interpreter is stuck in its own shutdown
                signal.setitimer(signal.ITIMER_REAL, INTERRUPT_GRACE_S + 0.5)
                time.sleep(INTERRUPT_GRACE_S)
                os._exit(ExitStatus.INTERRUPTED)
            if signum[0] == signal.SIGTERM and not _saves_first.is_set() and not left.wait(INTERRUPT_GRACE_S):
                os._exit(ExitStatus.TERMINATED)
