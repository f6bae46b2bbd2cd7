"""A command that takes seconds says on a terminal that it works; in a pipe, and in a log, nothing is added."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

REFRESHES_PER_S = 8


@contextmanager
def working(what: str) -> Generator[None]:
    """A spinner and ``what`` on stderr, where that is a terminal, until the block ends; nothing of it stays.

    What is printed meanwhile goes above it. Not for blocks that may end the process at once: nobody would give the
    cursor back.
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
        spinner, console=console, transient=True, refresh_per_second=REFRESHES_PER_S, redirect_stdout=on_terminal
    ):
        yield
