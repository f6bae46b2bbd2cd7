"""A command that takes seconds says on a terminal that it works; in a pipe, and in a log, nothing is added."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

REFRESHES_PER_S = 8


SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # and erase the line of a spinner


@contextmanager
def working(what: str, *, moves: bool = True) -> Generator[None]:
    """A spinner and ``what`` on stderr, where that is a terminal, until the block ends; nothing of it stays.

    What is printed meanwhile goes above it. Where the block may end the process at once, whoever started the process
    says `cursor_given_back`.

    Args:
        what: is under way.
        moves: by a thread of its own; without, the first picture stays, in a process that must have no other thread.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    on_terminal = sys.stdout.isatty()  # else what is printed goes where it was sent
    spinner = Spinner("dots", what)
    with Live(
        spinner,
        console=console,
        transient=True,
        auto_refresh=moves,
        refresh_per_second=REFRESHES_PER_S,
        redirect_stdout=on_terminal,
    ):
        yield


@contextmanager
def cursor_given_back() -> Generator[None]:
    """After the block a terminal has its cursor, also where a process that showed a spinner was ended at once."""
    try:
        yield
    finally:
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
            sys.stderr.flush()
