"""Running a command line in this process, and seeing what it does beside answering.

Guards, for each case: nothing is written outside of the case's folder, nothing is imported that only data name
(`TRAPS`), no process is started, nobody is connected to, and neither processor time nor address space grows beyond a
bound. They are an audit hook of Python's, which is told of all that before it happens
(https://docs.python.org/3/library/audit_events.html), and limits of the kernel's.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from zeroshard.cli import main
from zeroshard.errors import ExitStatus

CPU_S = 30.0  # of a case; the slowest ones take two
MORE_BYTES = 6 * 2**30  # of address space
ANSWERS = {ExitStatus.OK, ExitStatus.USAGE, ExitStatus.CHECK_FAILED, ExitStatus.STORAGE}
ONE_LINE = re.compile(r"error: [^\n]+?: [^\n]+; [^\n]+\n")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}
_STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system"}
_REACHES = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"}
TRAPS = {"trap", "this", "antigravity"}  # modules that only data name: see `fuzz_material.EDGES`
# written by Python, torch or matplotlib for themselves
_THEIRS = ("__pycache__", "/dev/null", "/.cache/", "/torchinductor_", "/.config/matplotlib")


class TookTooLongError(BaseException):
    """A case computed for longer than `CPU_S`; no Exception, so that no handler of the program's takes it."""


@dataclass
class _Watch:
    """What the audit hook looks for, while a case runs."""

    folder: str = ""
    seen: list[str] = field(default_factory=list)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event == "open":
            path, mode, flags = args
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITES)
            if writes and isinstance(path, str | bytes):
                self._look(event, path)
            elif isinstance(path, str) and path.startswith(self.folder) and path.endswith("/trap.py"):
                self.seen.append(f"code that data name is read: {path}")
        elif event == "import":
            if args[0] in TRAPS:
                self.seen.append(f"code that data name is imported: {args[0]}")
        elif event in _CHANGES:
            for path in args[:2] if event == "os.rename" else args[:1]:
                if isinstance(path, str | bytes):
                    self._look(event, path)
        elif event in _STARTS:
            if args[0] != "uname":  # which `platform` asks for the processor's name
                self.seen.append(f"{event} {args[0]!r}")
        elif event in _REACHES:
            raise OSError(101, "Network is unreachable")

    def _look(self, event: str, path: str | bytes) -> None:
        where = os.path.abspath(os.fsdecode(path))
        if not where.startswith(self.folder) and not any(part in f"{where}/" for part in _THEIRS):
            self.seen.append(f"{event} {where[:200]!r}")


_watch = _Watch()
sys.addaudithook(_watch)


@dataclass(frozen=True)
class Outcome:
    """How a case went: the exit status, what was printed, and everything that should not have been."""

    status: int | None
    out: str
    err: str
    wrong: tuple[str, ...]


def run(words: Sequence[str], folder: Path) -> Outcome:
    """Run ``zeroshard WORDS`` in ``folder``."""
    out, err, wrong = io.StringIO(), io.StringIO(), []
    status: int | None = None
    before = os.getcwd()
    os.chdir(folder)
    _watch.seen.clear()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited():
            _watch.folder = str(folder.resolve())
            try:
                status = main(words)
            finally:
                _watch.folder = ""
    except BaseException:  # noqa: BLE001 -- SystemExit too: `main` returns
        wrong.append(traceback.format_exc())
    finally:
        os.chdir(before)
    wrong += [f"beyond its folder: {each}" for each in _watch.seen]
    wrong += _judged(status, err.getvalue()) if status is not None else []
    return Outcome(status, out.getvalue(), err.getvalue(), tuple(wrong))


def _judged(status: int, err: str) -> list[str]:
    """What is wrong about how a command line ended."""
    wrong = []
    errors = [line for line in err.splitlines(keepends=True) if line.startswith("error: ")]
    ran_out = status == ExitStatus.FAILED and err.startswith("error: memory: ")
    if status not in ANSWERS and not ran_out:
        wrong.append(f"exit status {status}: {err[-2000:]}")
    if status in (ExitStatus.USAGE, ExitStatus.STORAGE):
        if len(errors) != 1 or not ONE_LINE.fullmatch(errors[0]):
            wrong.append(f"not one line of the form `error: FIELD: WHAT; TODO`: {err[-2000:]!r}")
        elif len(errors[0]) > 2000:
            wrong.append(f"a line of {len(errors[0])} letters: {errors[0][:300]}")
    if "Traceback" in err:
        wrong.append(err[-2000:])
    return wrong


@contextmanager
def _limited() -> Generator[None]:
    """Inside, `CPU_S` of processor time and `MORE_BYTES` of further address space are all there is."""

    def too_long(signum: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"more than {CPU_S:.0f} s of processor time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MORE_BYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, handler)
