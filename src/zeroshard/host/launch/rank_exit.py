"""How a rank ends: with its launcher, soon after Ctrl-C, or at once with a message.

[Note: nothing is left behind] A rank may be blocked in a collective, in C++, where Python runs no signal handler. So
three mechanisms end it. The agent signals every rank, and kills those that still run after `SHUTDOWN_GRACE_S`. After
Ctrl-C, SIGTERM or SIGHUP, if there is no checkpoint to write first, and after a second Ctrl-C in any case, a watching
thread ends its own process within `INTERRUPT_GRACE_S`. And the kernel kills a rank whose launcher has died, or that
hangs in its own exit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from zeroshard.host.errors import ExitStatus
from zeroshard.host.launch.environment import end_with_starter, tell_launcher

TIME_TO_SPEAK_S = 1.0
INTERRUPT_GRACE_S = 2.0  # from Ctrl-C to the end of a rank, whatever it is doing
_saves_first = threading.Event()


@contextmanager
def ended_with_launcher() -> Generator[None]:
    """Inside, this rank ends with its launcher, and soon after Ctrl-C: [Note: nothing is left behind]."""
    end_with_starter()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may install signal handlers
        yield
        return
    # Python runs its handlers on the main thread, which may block; the C handler writes to this descriptor at once
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    left = threading.Event()
    arguments = (reader, left)
    thread = threading.Thread(target=_end_after_interrupt, args=arguments, name="end-after-interrupt", daemon=True)
    thread.start()
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        left.set()
        signal.signal(signal.SIGINT, interrupt)
        signal.set_wakeup_fd(before)
        writer.close()


@contextmanager
def saves_before_end() -> Generator[None]:
    """Inside, SIGTERM, SIGHUP and one SIGINT do not end this rank within `INTERRUPT_GRACE_S`: it saves first."""
    _saves_first.set()
    try:
        yield
    finally:
        _saves_first.clear()


def end_as_peer_lost(line: str, speak: bool) -> NoReturn:
    """End this process now, from any thread: the main thread may be blocked in a collective for ever.

    With ``speak`` it prints ``line`` at once, because the launcher prints only when all ranks have ended.
    """
    tell_launcher("")
    if speak:
        print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(ExitStatus.PEER_LOST)


def end_as_hung(line: str, speak: bool) -> NoReturn:
    """End a rank whose step hangs. The ranks that do not ``speak`` end later, and leave ``line`` to their launcher.

    It prints the line if the rank that should speak cannot, and is killed.
    """
    if speak:
        end_as_peer_lost(line, True)
    time.sleep(TIME_TO_SPEAK_S)
    tell_launcher(line)
    os._exit(ExitStatus.PEER_LOST)


def end_at_once(line: str, status: ExitStatus) -> NoReturn:
    """End this process now with ``status``; its launcher prints ``line``, or this process if it has no launcher.

    Nothing is printed for an empty ``line``.
    """
    if not tell_launcher(line) and line:
        print(line, file=sys.stderr, flush=True)
    os._exit(status)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, and have the kernel end this process soon: the watching thread may never get the GIL."""
    end_by_kernel(INTERRUPT_GRACE_S + 0.5, ExitStatus.INTERRUPTED)
    raise KeyboardInterrupt


def _end_after_interrupt(reader: socket.socket, left: threading.Event) -> None:
    interrupted = False
    with reader:
        while signum := reader.recv(1):
            if signum[0] == signal.SIGINT and _saves_first.is_set() and not interrupted:
                interrupted = True
            elif signum[0] == signal.SIGINT:
                end_by_kernel(INTERRUPT_GRACE_S + 0.5, ExitStatus.INTERRUPTED)
                time.sleep(INTERRUPT_GRACE_S)
                os._exit(ExitStatus.INTERRUPTED)
            asked = signum[0] in (signal.SIGTERM, signal.SIGHUP)
            if asked and not _saves_first.is_set() and not left.wait(INTERRUPT_GRACE_S):
                os._exit(ExitStatus.TERMINATED)


class _Event(ctypes.Structure):
    """Linux's ``struct sigevent`` on 64 bits, with the fields that ``SIGEV_THREAD`` uses: 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_size_t),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    )


class _Times(ctypes.Structure):
    """Linux's ``struct itimerspec``: interval and first expiration, each in seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


def end_by_kernel(after_s: float, status: int) -> None:
    """Have this process end with ``status`` after ``after_s`` seconds, whichever thread holds Python's lock then.

    An interpreter that hangs in its own shutdown runs neither Python threads nor signal handlers. So a kernel timer
    calls C's ``_exit`` with the status, on a thread that the C library makes for it (``timer_create(2)``,
    ``SIGEV_THREAD``). On systems without such timers SIGALRM ends the process a second later, with status 142.
    """
    signal.setitimer(signal.ITIMER_REAL, after_s + 1.0)
    libc = ctypes.CDLL(None)
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8 or not hasattr(libc, "timer_create"):
        return
    in_a_thread, clock_monotonic, timer = 2, 1, ctypes.c_void_p()
    event = _Event(value=status, notify=in_a_thread, function=ctypes.cast(libc._exit, ctypes.c_void_p))
    if libc.timer_create(clock_monotonic, ctypes.byref(event), ctypes.byref(timer)) == 0:
        times = _Times(first_s=int(after_s), first_ns=int(after_s % 1 * 1e9))
        libc.timer_settime(timer, 0, ctypes.byref(times), None)
