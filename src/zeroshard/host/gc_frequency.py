"""Frequency of Python's cyclic garbage collector: rare while a command starts, Python's default while a run trains.

Torch's import makes half a million objects that live until the process ends. The collector scans them several times
during the import, and once more when the interpreter exits: a third of the time of a short command. Objects without
reference cycles are freed by reference counts in any case.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

DEFAULT_THRESHOLDS = gc.get_threshold()
# New objects before generation 0 is collected, then collections before each next generation.
RARE_THRESHOLDS = 100_000, 50, 1000


@contextmanager
def rare_collections() -> Generator[None]:
    """For a process that runs one command: few collections inside the block, and none when the interpreter exits."""
    gc.set_threshold(*RARE_THRESHOLDS)
    try:
        yield
    finally:
        gc.freeze()


def default_collections() -> None:
    """Restore Python's default frequency, and `freeze`."""
    freeze()
    gc.set_threshold(*DEFAULT_THRESHOLDS)


def freeze() -> None:
    """Have the collector ignore the objects that live already, until `unfreeze`.

    Where a caller has frozen objects, he decides: nothing happens, for ours would stay with his.
    """
    global _froze
    _froze = _froze or not gc.get_freeze_count()
    if _froze:
        gc.freeze()


def unfreeze() -> None:
    """End `freeze`; what a caller has frozen stays so."""
    global _froze
    if _froze:
        gc.unfreeze()
    _froze = False


_froze = False  # whether it is ours what is frozen
