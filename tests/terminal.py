"""A terminal for tests: what stands on it after all was written."""

from __future__ import annotations

import io

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
