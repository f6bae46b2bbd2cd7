"""A terminal for tests: what stands on it after everything was written, and a pseudo-terminal that records a program.

It knows what rich writes: text, line ends, colours, the cursor up, to the first column and away, lines and screens
erased. Anything else fails.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import struct
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import forked

_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Screen(io.StringIO):
    """A terminal of ``width`` columns and any number of lines, as a stream.

    Attributes:
        lines: what stands there, of the whole history.
        wrapped: texts that ran into the next line because they were wider than the terminal.
        cursor_shown: whether the cursor can be seen.
        written: all that was written, as it came.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.cursor_shown, self.written = width, True, ""
        self.lines, self.wrapped = [""], list[str]()
        self._row = self._column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += text
        at = 0
        while at < len(text):
            found = _SEQUENCE.match(text, at)
            if found:
                self._control(found[1], found[2])
                at = found.end()
                continue
            self._letter(text[at])
            at += 1
        return len(text)

    def _control(self, value: str, kind: str) -> None:
        if value == "?25":
            self.cursor_shown = kind == "h"
        elif kind == "A":
            self._row = max(0, self._row - int(value or 1))
        elif kind == "K":
            assert value == "2", value
            self.lines[self._row] = ""
        else:
            assert kind == "m", f"a terminal of the tests knows no {value}{kind}"

    def _letter(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\n":
            self._row, self._column = self._row + 1, 0
            if self._row == len(self.lines):
                self.lines.append("")
        else:
            if self._column == self.width:
                self.wrapped.append(self.lines[self._row])
                self._letter("\n")
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + letter + line[self._column + 1 :]
            self._column += 1

    @property
    def shown(self) -> list[str]:
        """The lines without blanks at their ends, and without empty ones at the end."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n").splitlines()


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
    screen = Screen(width)
    screen.write(seen.decode())
    return status, screen
