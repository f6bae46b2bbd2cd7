"""A spinner on the terminal for commands that take seconds; pipes and logs get no extra output."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

REFRESHES_PER_S = 8


SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # escape sequences: erase the spinner's line, show the cursor


@contextmanager
def working(what: str, *, moves: bool = True) -> Generator[None]:
    """Show a spinner and ``what`` on stderr while the block runs, if stderr is a terminal; then erase it.

    Lines that are printed meanwhile appear above it. If the block may kill the process, the parent process should use
    `cursor_given_back`.

    Args:
        what: the text beside the spinner.
        moves: whether a background thread animates it; use False in a process that must have no other thread.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    on_terminal = sys.stdout.isatty()  # a redirected stdout is left alone
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
    """Show the terminal's cursor after the block, even if a process was killed while it showed a spinner."""
    try:
        yield
    finally:
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
            sys.stderr.flush()
