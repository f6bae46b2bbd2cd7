"""`waiting`: shows on a terminal that a verb is at work, once it has said nothing for a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from zeroshard.train.records.console import ERASE

SILENCE_S = 1.0


@contextmanager
def waiting(what: str, *, silence_s: float = SILENCE_S, stream: TextIO | None = None) -> Generator[None]:
    """Show ``what`` and the seconds so far in a line of ``stream``, each second of this block but the first.

    The line leaves at the end of the block. Where the stream is no terminal nothing is written.

    Args:
        what: what takes so long, in words.
        stream: where to write; None: stderr.
    """
    stream = stream or sys.stderr
    if stream is None or not stream.isatty():  # None: closed, as by 2>&-
        yield
        return
    over, began = threading.Event(), time.monotonic()

    def show() -> None:
        while not over.wait(silence_s):
            stream.write(f"{ERASE}{what}: {time.monotonic() - began:.0f} s")
            stream.flush()

    thread = threading.Thread(target=show, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        stream.write(ERASE)
        stream.flush()
