"""Forks ranks from the launcher, so that torch is imported once and not by every rank.

`import torch` and the imports of an optimizer step cost five seconds of CPU time. A launcher that has done both forks a
rank in twenty milliseconds, and the ranks share the memory pages. A forked rank is set up as if it had been executed:
it has its own session and environment, default signal handlers, and no open files but the standard streams. Then it
runs ``python -m zeroshard`` and ends without returning into the launcher's code.

[Note: What a fork copies]
    A fork copies one thread and every lock. A lock that another thread held at that moment stays locked in the child
    for ever. So ranks are forked while the launcher has only its main thread: before it serves the ranks' rendezvous
    store (`zeroshard.host.launch.one_host`), and after the store of an earlier attempt was closed. (OpenBLAS's idle
    threads do no harm: OpenBLAS ends them itself before a fork.) CUDA must not have been initialised either, and is
    not, because a launcher uses no device. If one of these conditions does not hold, `can_fork` is False and ranks are
    spawned.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from zeroshard.host import gc_frequency

FIRST_FD = 3  # after the standard streams
POLL_S = 0.01
EXIT_BROKEN_PIPE = 120  # as the interpreter exits when it cannot flush its standard streams
_forked = False  # whether `as_executed` was called in this process


def exit_code_of_child(pid: int) -> int | None:
    """Return the exit code of a child of this process, negative for a signal; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


class StartedRank:
    """A rank, which leads its process group, with the methods of `subprocess.Popen` that torch's agent uses.

    Args:
        exit_code: returns the exit code of the process with this id; None while it runs.
    """

    def __init__(self, pid: int, exit_code: Callable[[int], int | None] = exit_code_of_child) -> None:
        self.pid, self._exit_code = pid, exit_code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self.returncode = self._exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and those that it has started, unless it has ended."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it was forked a moment ago and does not lead a process group yet
                os.kill(self.pid, number)


def can_fork() -> bool:
    """Return whether this process may fork ranks: [Note: What a fork copies]."""
    cuda = sys.modules.get("torch.cuda")
    return (
        sys.platform == "linux"
        and threading.current_thread() is threading.main_thread()
        and threading.active_count() == 1
        and not (cuda is not None and cuda.is_initialized())
    )


def import_all(modules: Sequence[str]) -> None:
    """Import ``modules``, which every rank needs, and exempt all objects from garbage collection.

    The collector would write to their memory pages, and a forked process gets its own copy of each page that changes.
    """
    for name in modules:
        import_module(name)
    gc_frequency.freeze()


def fork_command(words: Sequence[str], env: Mapping[str, str]) -> StartedRank:
    """Run ``python -m zeroshard WORDS`` in a forked process; ``env`` is its complete environment."""
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the child has handlers of its own
    try:
        pid = os.fork()
        if pid == 0:
            _become_command(words, env, mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return StartedRank(pid)


def spawn_command(words: Sequence[str], env: Mapping[str, str]) -> StartedRank:
    """Run ``python -m zeroshard WORDS`` in a new process; ``env`` is its complete environment."""
    process = subprocess.Popen([sys.executable, "-m", "zeroshard", *words], env=env, start_new_session=True)
    return StartedRank(process.pid, lambda _: process.poll())


def is_forked() -> bool:
    """Return whether this process was forked to run a command. It ends by `os._exit`, which calls no destructors."""
    return _forked


def as_executed(env: Mapping[str, str]) -> None:
    """Bring a forked process into the state of a newly executed program with the environment ``env``.

    It resets signal handlers, closes all files but the standard streams, replaces the environment, and drops the
    finalizers that the parent has registered for its own exit (to remove a temporary folder, say). torch gets as many
    threads as ``OMP_NUM_THREADS`` says.
    """
    global _forked
    _forked = True
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.closerange(FIRST_FD, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(env)
    for finalizer in list(weakref.finalize._registry):  # ty: ignore[missing-attribute]
        finalizer.atexit = False
    torch = sys.modules.get("torch")
    if torch is not None and env.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # OpenMP read its variable when torch was imported


def run_main(main: Callable[[], object]) -> int:
    """Run ``main`` as a program; return its exit status.

    As the interpreter does at exit, it prints an uncaught exception, runs exit functions and flushes the output.
    """
    try:
        main()
        status = 0
    except SystemExit as stop:
        status = _status(stop.code)
    except BaseException as error:  # noqa: BLE001 -- printed as the interpreter prints it
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # ty: ignore[missing-attribute]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # the process that read our output has ended
            status = status or EXIT_BROKEN_PIPE
    return status


def _status(code: object) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _become_command(words: Sequence[str], env: Mapping[str, str], mask: Iterable[int]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        as_executed(env)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.argv = ["zeroshard", *words]
        status = run_main(lambda: runpy.run_module("zeroshard", run_name="__main__", alter_sys=True))
    except BaseException:  # noqa: BLE001 -- nothing may return into the launcher's frames
        traceback.print_exc()
    finally:
        os._exit(status)
