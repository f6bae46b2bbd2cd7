"""How often Python looks for garbage: hardly ever while a command starts, as ever while a run trains.

Torch's import makes half a million objects that live until the process ends. The collector goes over them several
times on the way, and once more at the interpreter's end: a third of the time of a short command. Reference counts free
what has no cycle all the same.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

AS_EVER = gc.get_threshold()
SELDOM = 100_000, 50, 1000  # objects made before the young are searched; then how many searches before the next age's


@contextmanager
def seldom() -> Generator[None]:
    """For a process that is one command: few searches inside, and none when the interpreter ends."""
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.freeze()


def as_ever() -> None:
    """From here on search as Python does by itself, but not through what lives already, until ``gc.unfreeze()``."""
    gc.freeze()
    gc.set_threshold(*AS_EVER)
