"""A terminal for tests: what stands on it after all was written, and a pseudo-terminal that records a program."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import struct
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import forked

ERASE_LINE = "\x1b[2K"  # the one sequence that commands write


class Screen(io.StringIO):
    """A terminal as a stream; ``written``: all that was written, as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.written = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    @property
    def shown(self) -> list[str]:
        """The lines that stand there, without blanks at their ends, and without empty ones at the end."""
        lines = []
        for line in self.written.replace("\r\n", "\n").split("\n"):
            shown = ""
            for part in line.split("\r"):  # each begins at the first column
                erased = ERASE_LINE in part
                part = part.replace(ERASE_LINE, "")
                assert "\x1b" not in part, f"a terminal of the tests knows no {part!r}"
                shown = part if erased else part + shown[len(part) :]
            lines.append(shown.rstrip())
        return "\n".join(lines).rstrip("\n").splitlines()


def record(words: Sequence[str], width: int, cwd: Path, interrupt_at: str) -> tuple[int, Screen]:
    """Run ``python WORDS`` on a pseudo-terminal of ``width`` columns: its exit status, and what it left there.

    Args:
        words: after ``python``, as `tests.forked` takes them.
        width: of the terminal, in columns.
        cwd: where it runs.
        interrupt_at: once this text has appeared, the program gets SIGINT, as by Ctrl-C.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm"}
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    program = forked.Popen([sys.executable, *words], cwd=cwd, env=env, **ends)
    os.close(theirs)
    seen, interrupted = b"", False
    while True:
        try:
            some = os.read(ours, 1 << 16)
        except OSError:  # the last of its programs has closed it
            break
        if not some:
            break
        seen += some
        if not interrupted and interrupt_at.encode() in seen:
            program.send_signal(signal.SIGINT)
            interrupted = True
    status = program.wait()
    os.close(ours)
    screen = Screen()
    screen.write(seen.decode())
    return status, screen
