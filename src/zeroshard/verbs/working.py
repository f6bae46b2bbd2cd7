"""A word on the terminal while a command works for seconds; pipes and logs get no extra output."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

_ERASE_LINE = "\r\x1b[2K"


@contextmanager
def working(what: str) -> Generator[None]:
    """Show ``what`` on stderr while the block runs, if stderr is a terminal; then erase it.

    The cursor goes back to the line's beginning, so that the first line which the block prints replaces it.
    """
    if not sys.stderr.isatty():
        yield
        return
    print(f"{what} ...\r", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(_ERASE_LINE, end="", file=sys.stderr, flush=True)
